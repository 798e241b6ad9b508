"""Rows of training data, read and checked.

A file is .jsonl (an object a line) or .json (a list of objects). A row is one of

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}     tools are optional
    {"prompt": "...", "completion": "..."}      two strings, or two lists of messages (and tools)
    {"text": "..."}

Other keys of a row are not used, and said to be in the report. Keys of a message that are not
checked here (name, reasoning_content, ...) reach the chat template as they are.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krnl.data.template import Message
from krnl.errors import DataError
from krnl.strict_json import unique_keys

_ROLES = ("system", "user", "assistant", "tool")
_KINDS = (("messages",), ("prompt", "completion"), ("text",))
_VALID_NAMES = ("valid", "validation", "val", "dev")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class _Placed:
    """Where a row stands, for messages about it. `ignored`: its keys that training does not use."""

    path: Path
    line: int
    ignored: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"


@dataclass(frozen=True)
class Chat(_Placed):
    """A conversation. Assistant turns before index `first` are prompt, never targets."""

    messages: list[Message]
    first: int
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Plain(_Placed):
    """Plain text: `completion` is trained, `prompt` (empty for `text` rows) only read."""

    prompt: str
    completion: str


Row = Chat | Plain


def split(path: Path) -> tuple[Path, Path | None]:
    """The files to train on and to validate on; a single file is all training.

    A folder holds train.jsonl or train.json and perhaps valid, validation, val or dev likewise.
    Raises DataError if there is no training file or if two files claim one role.
    """
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give a .jsonl or .json file, or a folder.")
    train, valid = (
        [path / f"{name}{end}" for name in names for end in (".jsonl", ".json")]
        for names in (("train",), _VALID_NAMES)
    )
    found = [[file for file in files if file.is_file()] for files in (train, valid)]
    for files in found:
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise DataError(f"{path} has {names}: keep one of them.")
    if not found[0]:
        raise DataError(f"{path} has neither train.jsonl nor train.json.")
    return found[0][0], found[1][0] if found[1] else None


def read_rows(path: Path) -> list[Row]:
    """Every row of a .jsonl file (an object a line; blank lines are skipped) or of a .json file (a
    list of objects, or an object of which one value is that list).

    Raises DataError naming file and line for whatever is not a row, and for a file without rows.
    """
    parsers = {".jsonl": _parse_lines, ".json": _parse_list}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise DataError(f"{path} is not training data KRNL reads: use .jsonl or .json.")
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    rows = [_row(value, path, line) for line, value in parse(path)]
    if not rows:
        raise DataError(f"{path} is empty: it has no rows.")
    return rows


def _parse_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line. Lines end at line feeds alone, since JSON strings may hold
    other separators of Unicode."""
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            text = _decode(raw.rstrip(b"\r\n"), path, line)
            if not text.strip():
                continue
            whole = line == 1 and text.strip() in ("[", "{")
            hint = " If the file is one JSON value, name it .json." if whole else ""
            yield line, _parse(text, path, line, hint)


def _parse_list(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each element of the list in a .json file."""
    text = _decode(path.read_bytes(), path, 1)
    if not text.strip():
        return
    value = _parse(text, path, 1, " If the file has one object a line, name it .jsonl.")
    at = _skip_space(text, 0)
    if isinstance(value, dict):
        lists = [key for key, entry in value.items() if isinstance(entry, list)]
        if len(lists) != 1:
            raise DataError(f"{path}: an object must hold exactly one list of rows.")
        at = _value_of(text, at, lists[0])
        value = value[lists[0]]
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of rows.")
    line, counted = 1, 0
    for element in value:
        at = _skip_space(text, at + 1)  # past the bracket or comma
        line, counted = line + text.count("\n", counted, at), at
        yield line, element
        at = _skip_space(text, _after_value(text, at))


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8. Save it as UTF-8."
        ) from error


def _parse(text: str, path: Path, line: int, hint: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}"
        reason = f"{error.msg} at column {error.colno}"
        raise DataError(f"{where}: not valid JSON ({reason}).{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}: cannot be read ({error}).") from error


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after_value(text: str, at: int) -> int:
    return json.JSONDecoder().raw_decode(text, at)[1]


def _value_of(text: str, at: int, key: str) -> int:
    """Where the value of `key` begins in the valid, non-empty JSON object at `at`."""
    while True:
        at = _skip_space(text, at + 1)  # past the brace or comma
        name, at = json.JSONDecoder().raw_decode(text, at)
        at = _skip_space(text, _skip_space(text, at) + 1)  # past the colon
        if name == key:
            return at
        at = _skip_space(text, _after_value(text, at))


def _row(value: Any, path: Path, line: int) -> Row:
    where = f"{path}, line {line}"
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {_name(value)}.")
    kinds = [keys for keys in _KINDS if all(key in value for key in keys)]
    if len(kinds) != 1:
        found = ", ".join(map(repr, value)) or "nothing"
        raise DataError(
            f"{where}: a row needs exactly one of `messages`, `prompt` with `completion`, and "
            f"`text`; this one has {found}."
        )
    used: tuple[str, ...] = kinds[0]
    parts = [value[key] for key in used]
    if used == ("messages",) or all(isinstance(part, list) for part in parts):
        lists = [
            _messages(part, f"{where}: `{key}`") for key, part in zip(used, parts, strict=True)
        ]
        first = len(lists[0]) if len(lists) > 1 else 0
        tools = _tools(value.get("tools"), where)
        used = (*used, "tools")
        ignored = tuple(key for key in value if key not in used)
        return Chat(path, line, ignored, [m for part in lists for m in part], first, tools)
    for key, part in zip(used, parts, strict=True):
        if not isinstance(part, str):
            also = " (or both lists of messages)" if len(used) > 1 else ""
            raise DataError(f"{where}: `{key}` must be a string{also}, not {_name(part)}.")
    prompt, completion = parts if len(parts) == 2 else ("", parts[0])
    return Plain(path, line, tuple(key for key in value if key not in used), prompt, completion)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a list of at least one message, not {_name(value)}.")
    return [_message(entry, f"{where}, message {i}") for i, entry in enumerate(value, 1)]


def _message(value: Any, where: str) -> Message:
    """A checked copy of the message: content as one string, arguments of tool calls as objects."""
    if not isinstance(value, dict) or "role" not in value:
        raise DataError(f"{where} must be an object with `role` and `content`.")
    message = dict(value)
    role = message["role"]
    if role not in _ROLES:
        raise DataError(f"{where} has the role {role!r}; the roles are {', '.join(_ROLES)}.")
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        if not all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        ):
            raise DataError(
                f'{where}: every part of `content` must be {{"type": "text", "text": "..."}}; '
                "images and other parts cannot be trained."
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(
            f"{where}: `content` must be a string or a list of text parts, not {_name(content)}."
        )
    message["content"] = content
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, where)
    return message


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls whose arguments are objects: as JSON in a string, templates would quote them twice."""
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise DataError(f"{where}: `tool_calls` must be a list of objects.")
    calls = []
    for call in value:
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise DataError(
                    f"{where}: the arguments of a tool call are not JSON: {error}"
                ) from error
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    if value is None or (isinstance(value, list) and all(isinstance(t, dict) for t in value)):
        return value
    raise DataError(f"{where}: `tools` must be a list of objects, not {_name(value)}.")


def _name(value: Any) -> str:
    """A JSON value's kind, for people."""
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")
