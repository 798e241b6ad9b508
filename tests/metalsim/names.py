"""The names that Metal has, and the base of every object that stands in for one of Metal's.

metal_names.json is made by scripts/read_metal_names.py. A name that Metal does not have is an error
here, as it would be on a Mac; so is one that came with a later macOS than `MACOS`, the oldest on
which KRNL is meant to run.
"""
# ruff: noqa: N802

import json
from functools import cache
from pathlib import Path
from typing import Any

MACOS = (14, 0)
NAMES = json.loads((Path(__file__).parent / "metal_names.json").read_text("utf-8"))
# What every class has, and the two of NSDictionary and NSError that Metal's callers need.
FOUNDATION = {
    "NSObject": ["alloc", "init", "new", "respondsToSelector:"],
    "NSDictionary": ["objectForKey:", "allKeys", "allValues", "count"],
    "NSError": ["code", "domain", "localizedDescription", "userInfo"],
}


class MetalMisuseError(AssertionError):
    """Something that Metal's validation layer stops a program for."""


@cache
def selectors(class_name: str) -> dict[str, str]:
    """A class's selectors and its parents', with the macOS that each came with ("": always)."""
    if class_name in FOUNDATION:
        return dict.fromkeys(FOUNDATION[class_name], "")
    entry = NAMES["classes"][class_name]
    found = dict.fromkeys(FOUNDATION["NSObject"], "")
    for parent in entry["parents"]:
        found.update(selectors(parent))
    return found | entry["selectors"]


def is_here(introduced: str) -> bool:
    return not introduced or tuple(map(int, introduced.split("."))) <= MACOS


class MetalObject:
    """Stands in for an Objective-C object: a method `a_b_` is the selector `a:b:`."""

    class_name = "NSObject"

    @classmethod
    def alloc(cls) -> "MetalObject":
        return cls()

    def init(self) -> "MetalObject":
        return self

    def __getattr__(self, name: str) -> Any:
        selector = name.replace("_", ":")
        introduced = selectors(self.class_name).get(selector)
        if introduced is None:
            raise AttributeError(f"Metal has no -[{self.class_name} {selector}].")
        if not is_here(introduced):
            raise AttributeError(
                f"-[{self.class_name} {selector}] came with macOS {introduced}; this is "
                f"{'.'.join(map(str, MACOS))}."
            )
        return self._missing(selector)

    def _missing(self, selector: str) -> Any:
        raise AttributeError(f"The simulator lacks -[{self.class_name} {selector}].")


class Labelled(MetalObject):
    """An object with a label for messages and tools."""

    _label: str | None = None

    def label(self) -> str | None:
        return self._label

    def setLabel_(self, label: str) -> None:
        self._label = label


class Properties(MetalObject):
    """A class of plain properties: x(), and setX_(value)."""

    _defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self._values = dict(self._defaults)

    def _missing(self, selector: str) -> Any:
        if selector.startswith("set") and selector.endswith(":"):
            name = selector[3].lower() + selector[4:-1]
            return lambda value: self._values.__setitem__(name, value)
        return lambda: self._values.get(selector)


class NSError(MetalObject):
    class_name = "NSError"

    def __init__(self, domain: str, code: int, text: str, info: dict[str, Any] | None = None):
        self._domain, self._code, self._text = domain, code, text
        self._info = NSDictionary(info or {})

    def domain(self) -> str:
        return self._domain

    def code(self) -> int:
        return self._code

    def localizedDescription(self) -> str:
        return self._text

    def userInfo(self) -> "NSDictionary":
        return self._info


class NSDictionary(MetalObject):
    class_name = "NSDictionary"

    def __init__(self, content: dict[str, Any]):
        self._content = content

    def objectForKey_(self, key: str) -> Any:
        return self._content.get(key)

    def allKeys(self) -> list[str]:
        return list(self._content)

    def allValues(self) -> list[Any]:
        return list(self._content.values())

    def count(self) -> int:
        return len(self._content)
