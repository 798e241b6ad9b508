"""The pass over a preprocessed CUDA source: what a C++ compiler does not know becomes what it does.

An `asm` statement becomes calls of functions in include/ptx.h, one for each PTX instruction, so
that the wrappers of KRNL's headers are run as they are written. `__shared__` variables become
references into the memory that the engine keeps for a block. The text keeps its lines.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"
# Of these, functions are kept as they are, so that a report can say who called them.
WAITING = re.compile(r"mbarrier\.try_wait|bar\.sync|barrier\.cluster\.wait|wgmma\.wait_group")
CONTROL = re.compile(r"bra\b|@")


class SourceError(ValueError):
    """Something in a source that the simulator does not know."""


def expand(text: str, name: str, headers: dict[str, str]) -> str:
    """The source with its headers put in place, each once."""
    seen: set[str] = set()

    def lines(text: str, name: str) -> Iterator[str]:
        yield f'# 1 "{name}"'
        for number, line in enumerate(text.splitlines(), 1):
            included = re.match(r'\s*#\s*include\s+"(.+)"', line)
            if included and included[1] not in headers:
                raise SourceError(f"{name}:{number} includes '{included[1]}', which is not there.")
            if included:
                if included[1] not in seen:
                    seen.add(included[1])
                    yield from lines(headers[included[1]], included[1])
                yield f'# {number + 1} "{name}"'
            elif line.strip() != "#pragma once":
                yield line
            else:
                yield ""

    return "\n".join(lines(text, name)) + "\n"


def convert(text: str) -> str:
    """C++ of a preprocessed source. SourceError names what is not known, and its place."""
    return _without_asm(_without_shared(text))


# ---- Shared memory ----

_ALIGNED = r"(?:(?:__align__|alignas)\s*\((?P<{}>[^()]*)\)\s*)?"
_SHARED = re.compile(
    _ALIGNED.format("before")
    + r"\b(?P<extern>extern\s+)?__shared__\s+"
    + _ALIGNED.format("behind")
    + r"(?P<type>\w+)\s+(?P<names>[^;{}=]+);"
)


def _without_shared(text: str) -> str:
    count = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        type_, made = found["type"], []
        for declared in _split(found["names"], ","):
            name, _, sizes = declared.strip().partition("[")
            whole = f"{type_}[{sizes}" if sizes else type_
            alignment = found["before"] or found["behind"] or f"alignof({type_})"
            if found["extern"]:
                made.append(
                    f"{type_} *const {name} = "
                    f"static_cast<{type_} *>(cudasim_dynamic_shared({alignment}));"
                )
                continue
            count += 1
            key, kind = f"cudasim_key_{count}", f"cudasim_type_{count}"
            made.append(
                f"static char {key}; using {kind} = {whole}; "
                f"{kind} &{name} = *static_cast<{kind} *>"
                f"(cudasim_shared(&{key}, sizeof({kind}), {alignment}));"
            )
        return " ".join(made) + "\n" * found[0].count("\n")

    converted = _SHARED.sub(replace, text)
    if left := re.search(r"__shared__[^\n]*", converted):
        raise SourceError(f"{_place(converted, left.start())}: '{left[0].strip()}' is not known.")
    return converted


# ---- Instructions ----


def _without_asm(text: str) -> str:
    parts, end = [], 0
    for found in re.finditer(r"\basm\b\s*(?:volatile\b\s*)?\(", text):
        stop = _closing(text, found.end())
        sections = [_split(part, ",") for part in _split(text[found.end() : stop], ":")]
        ptx = "".join(_strings(",".join(sections[0])))
        operands = [_operand(x) for part in sections[1:3] for x in part if x.strip()]
        before = text[end : found.start()]
        if WAITING.search(ptx):
            head, mark, tail = before.rpartition("__device__")
            before = f"{head}{mark} __attribute__((noinline)){tail}" if mark else before
        where = _place(text, found.start())
        calls = " ".join(_calls(ptx, operands, where))
        lines = text[found.start() : stop].count("\n")
        parts += [before, "{ ", calls, " }", "\n" * lines]
        end = stop + 1
    return "".join(parts) + text[end:]


def _calls(ptx: str, operands: list[str], where: str) -> Iterator[str]:
    """C++ statements for the instructions of an asm text."""
    predicates: dict[str, str] = {}
    for instruction in ptx.split(";"):
        instruction = re.sub(r"^(?:\s*(?:[{}]|\w+:(?!:)))*\s*", "", instruction).strip()
        name, _, rest = instruction.partition(" ")
        if not instruction or name == ".reg":
            continue
        if CONTROL.match(instruction):
            if "try_wait" not in ptx:
                raise SourceError(f"{where}: branches are known only around mbarrier.try_wait.")
            continue
        values = [_value(x, operands, predicates) for x in _operands(rest)]
        if name == "setp.ne.b32":
            predicate = next(iter(_operands(rest)))
            predicates[predicate] = f"({values[1]} != {values[2]})"
            continue
        if name.startswith("mbarrier.try_wait"):
            values = values[1:]  # the predicate
        if product := _PRODUCT.fullmatch(name):
            yield _product_call(product, rest, values)
            continue
        function = name.replace("::", "_").replace(".", "_")
        if function not in _known():
            raise SourceError(f"{where}: the simulator has no instruction {name}; add it to ptx.h.")
        yield f"ptx::{function}({', '.join(x for x in values if x)});"


_PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2")


def _product_call(name: re.Match[str], operands: str, values: list[str]) -> str:
    """The sums are one argument, and so are registers that hold operand a."""
    a = list(_operands(operands))[1]
    sums, operand_a, *rest = values
    if a.startswith("{"):
        operand_a = f"ptx::Registers{{{{{operand_a}}}}}"
    bf16 = str(name[2] == "bf16").lower()
    given = ", ".join([f"ptx::span<{int(name[1]) // 2}>({sums})", operand_a, *rest])
    return f"ptx::wgmma<{name[1]}, {bf16}>({given});"


@cache
def _known() -> set[str]:
    return set(re.findall(r"^PTX \w+ (\w+)\(", (INCLUDE / "ptx.h").read_text("utf-8"), re.M))


def _operands(text: str) -> Iterator[str]:
    """Of an instruction. A list in braces is one."""
    depth = start = 0
    for i, letter in enumerate(text + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            yield text[start:i].strip(" \n[]")
            start = i + 1


def _value(text: str, operands: list[str], predicates: dict[str, str]) -> str:
    """C++ of an operand: "" for the one that takes what nobody wants."""
    if text.startswith("{"):
        return ", ".join(_value(x.strip(), operands, predicates) for x in text[1:-1].split(","))
    if found := re.fullmatch(r"%(\d+)", text):
        return operands[int(found[1])]
    if found := re.fullmatch(r"%%(\w+)", text):
        return f"ptx::{found[1]}()"
    return "" if text == "_" else predicates.get(text, text)


def _operand(text: str) -> str:
    """The expression of "constraint"(expression)."""
    return text[text.index("(") :].strip()


# ---- Text ----


def _strings(text: str) -> Iterator[str]:
    for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', text):
        yield literal.replace("\\n", "\n").replace("\\t", "\t")


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that opened before `start`."""
    depth, i = 1, start
    while depth:
        if text[i] == '"':
            i = _string_end(text, i)
        depth += (text[i] == "(") - (text[i] == ")")
        i += 1
    return i - 1


def _string_end(text: str, start: int) -> int:
    i = start + 1
    while text[i] != '"':
        i += 2 if text[i] == "\\" else 1
    return i


def _split(text: str, separator: str) -> list[str]:
    """At separators outside brackets and strings."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        letter = text[i]
        if letter == '"':
            i = _string_end(text, i)
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        elif letter == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def _place(text: str, position: int) -> str:
    """file:line, by the preprocessor's markers."""
    markers = list(re.finditer(r'^# (\d+) "([^"]*)".*$', text[:position], re.M))
    if not markers:
        return f"line {text.count(chr(10), 0, position) + 1}"
    last = markers[-1]
    return f"{last[2]}:{int(last[1]) + text.count(chr(10), last.end() + 1, position)}"
