"""Chat templates: Jinja source from a checkpoint, as a function from a conversation to text.

Templates are foreign code. They run in Jinja's immutable sandbox and see the names that published
templates rely on: messages, tools, documents, add_generation_prompt, the special tokens by name
(bos_token, eos_token, ...), raise_exception, strftime_now, a `tojson` that leaves characters as
they are, `break` and `continue`, and `{% generation %}` blocks, which are rendered as if the tags
were not there. Source: the Hugging Face documentation on writing chat templates.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from krnl.errors import DataError, FormatError

Message = dict[str, Any]


class ChatTemplate:
    """The chat templates of one tokenizer, by name."""

    def __init__(
        self, sources: Mapping[str, str], token_names: Mapping[str, str], where: str
    ) -> None:
        """sources: Jinja source by template name; token_names: bos_token, eos_token, ... -> string.

        Raises FormatError if a template is not valid Jinja.
        """
        self._where = where
        self._token_names = dict(token_names)
        environment = _environment()
        self._compiled = {}
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise FormatError(
                    f"The chat template {name!r} in {where} is not valid Jinja: "
                    f"{error.message} (line {error.lineno})."
                ) from error

    def __bool__(self) -> bool:
        """Whether there is a template."""
        return bool(self._compiled)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as one text.

        With tools it is the template named "tool_use" that writes it, if there is one.
        Raises FormatError without a template and DataError if the template refuses.
        """
        template = self._compiled.get("tool_use") if tools else None
        template = template or self._compiled.get("default")
        if template is None:
            raise FormatError(
                f"The tokenizer in {self._where} has no chat template for conversations. Put a "
                "chat_template.jinja beside tokenizer.json, or use `prompt` and `completion` "
                "strings, or `text`."
            )
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._token_names,
            )
        except Exception as error:  # foreign code fails with whatever its expressions raise
            raise DataError(f"the chat template refuses this conversation: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox. Its clock stands still, so that a template that writes the date or the time
    renders all rows of a run alike."""
    now = datetime.datetime.now()

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": raise_exception,
        "strftime_now": now.strftime,
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = to_json
    return environment


class _Generation(Extension):
    """Puts the body of `{% generation %} ... {% endgeneration %}` in the place of the block."""

    tags = {"generation"}  # noqa: RUF012  (the name and type are Jinja's)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
