"""Reading config.json without overlooking anything: what nobody asked for is refused by name."""

import json
import math
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from krnl.errors import ConfigError

# What to say about fields that are refused more often than others.
ADVICE = {
    "quantization_config": "KRNL does not train quantised checkpoints; use the original one",
    "auto_map": "KRNL does not run code that comes with a model",
}


class Fields:
    """A JSON object with a memory of what was asked for. Every error is a ConfigError with the key.

    A field that is absent and one that is null mean the same, unless the caller looks at `content`.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self.where = where
        self.taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it is."""
        self.taken.add(key)
        value = self.content.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; without a default it has to be there."""
        value = self.take(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, value, f"it must be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; without a default it has to be there."""
        value = self.take(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, value, "it must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.take(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "it must be true or false")
        return value

    def choices(self, key: str, default: list[Any], allowed: Collection[object]) -> list[Any]:
        """A list as long as `default`, of values that are all `allowed`."""
        values = self.take(key, default)
        fits = isinstance(values, list) and len(values) == len(default)
        if not fits or any(value not in allowed for value in values):
            rule = f"it must hold {len(default)} values, each one of {', '.join(map(str, allowed))}"
            raise self.error(key, values, rule)
        return list(values)

    def error(self, key: str, value: object, rule: str) -> ConfigError:
        """The sentence for a field that cannot be used: where it is, what it is, what it may be."""
        shown = "missing" if value is None else textwrap.shorten(json.dumps(value), 100)
        return ConfigError(f"{self.where}: {key} is {shown}; {rule}.")

    def refuse_rest(self, harmless: Collection[str] = ()) -> None:
        """Refuse what was not taken, unless it is `harmless`, private (_name) or switched off."""
        for key, value in self.content.items():
            known = key in self.taken or key in harmless or key.startswith("_")
            if not known and value not in (None, False, 0, "", [], {}):
                raise self.error(key, value, ADVICE.get(key, "KRNL does not support this field"))
