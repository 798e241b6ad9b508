"""Static checks of Metal sources: what a Mac's compiler refuses, and what our kernels do without.

A kernel that runs in the simulator is not yet one that a Mac compiles, as the simulator erases
address spaces. So a source is read twice more: here, by rules about its tokens; and by clang with
lint/metal_lint.h, where address spaces are part of types, vectors do not convert by themselves and
accumulators are float. The calls in what clang makes of it tell whether anything is recursive.

Only the dialect of our own kernels is understood, not Metal as others write it."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from . import build, source
from .declarations import (
    SPACES,
    Declaration,
    declarations,
    is_threadgroup_variable,
    parameters,
)
from .lint_rewrite import rewritten
from .tokens import (
    SourceError,
    Token,
    attributes,
    is_attribute,
    matching_angle,
    text_of,
    tokenize,
    without_attributes,
)

HEADERS = Path(__file__).parent / "lint"
BUFFERS = 31  # indices, from 0
# Of one kernel, these are all scalars, or all vectors of as many elements.
POSITIONS = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "dispatch_threads_per_threadgroup",
}

BITS = "fast math may assume that every value is finite; test the bits"
BANNED = {
    "double": "Metal has no double",
    "goto": "Metal has no goto",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "virtual": "Metal has no virtual functions",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "thread_local": "Metal has no thread_local",
    "asm": "Metal has no assembly",
    "isnan": BITS,
    "isinf": BITS,
    "isfinite": BITS,
    "isnormal": BITS,
    "__builtin_inff": BITS,  # INFINITY
    "__builtin_nanf": BITS,  # NAN
}
FLOATING = re.compile(
    r"(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+|0[xX][\da-fA-F.]+[pP][+-]?\d+"
)


@dataclass(frozen=True)
class Finding:
    place: str  # file.metal:12
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def lint(path: Path, experiment: bool = False) -> list[Finding]:
    """What is wrong with a source. An experiment may use bfloat, and accumulators of any type."""
    text = build.preprocess(path)
    findings: list[Finding] = []
    try:
        tokens = tokenize(text, path.name)
        findings += _words(tokens, experiment)
        findings += _declarations(tokens)
        source.convert(text, path.name)  # its messages are about names and bindings
        findings += _compile(tokens, experiment)
    except SourceError as error:
        place, _, message = str(error).partition(": ")
        findings.append(Finding(Path(place).name, message))
    return findings


def _at(token: Token, message: str) -> Finding:
    return Finding(Path(token.place).name, message)


# Rules about single tokens


def _words(tokens: Sequence[Token], experiment: bool) -> Iterator[Finding]:
    for i, token in enumerate(tokens):
        if token.text in BANNED:
            yield _at(token, f"{token.text}: {BANNED[token.text]}")
        elif token.text.startswith("atomic"):
            yield _at(token, f"{token.text}: results must not depend on the order of threads")
        elif token.text == "bfloat" and not experiment:
            yield _at(token, "bfloat: M1 and M2 emulate it; keep its bits in ushort")
        elif token.kind == "number" and FLOATING.fullmatch(token.text):
            yield _at(token, f"the literal {token.text} has no suffix: f or h")
        elif token.text == "[" and _begins_lambda(tokens, i):
            yield _at(token, "Metal has no lambdas before version 4")


def _begins_lambda(tokens: Sequence[Token], i: int) -> bool:
    """Every other bracket subscripts something, declares an array or holds an attribute."""
    before = tokens[i - 1]
    if is_attribute(tokens, i) or (before.text == "[" and is_attribute(tokens, i - 1)):
        return False
    named = before.kind in ("word", "number", "string") and before.text != "return"
    return not named and before.text not in (")", "]", ">")


# Rules about declarations


def _declarations(tokens: Sequence[Token]) -> Iterator[Finding]:
    for declaration in declarations(tokens):
        first, name = tokens[declaration.start], declaration.name.text
        words = {token.text for token in declaration.head}
        if declaration.kind == "variable":
            if "threadgroup" in words:
                yield _at(first, f"{name}: a threadgroup variable outside a kernel")
            elif "constant" not in words:
                yield _at(first, f"{name}: a global that is not constant")
        elif declaration.kind == "instantiation":
            yield from _instantiation(first, declaration)
        elif declaration.kind == "function":
            yield from _function(tokens, declaration)


def _instantiation(first: Token, declaration: Declaration) -> Iterator[Finding]:
    texts = [token.text for token in declaration.head]
    if "host_name" not in declaration.marks or "kernel" not in texts:
        yield _at(first, "an instantiation that is no kernel with a host_name")
    if "decltype" in texts or texts[-1] != ")":
        yield _at(first, "an instantiation that does not repeat the kernel's signature")


def _function(tokens: Sequence[Token], declaration: Declaration) -> Iterator[Finding]:
    assert declaration.body is not None
    taken: set[str] = set()
    sizes: set[str] = set()
    for parameter in parameters(tokens, declaration):
        words = {token.text for token in without_attributes(parameter)}
        refers = bool(words & {"*", "&"})
        if refers and not words & SPACES:
            yield _at(parameter[0], f"{text_of(parameter)}: no address space")
        if declaration.is_kernel:
            yield from _argument(parameter, refers, taken)
            if POSITIONS & {name.text for name, _ in attributes(parameter)}:
                sizes.add("".join(filter(str.isdigit, parameter[0].text)))
                if len(sizes) > 1:
                    yield _at(parameter[0], f"{text_of(parameter)}: positions of several sizes")
    start, stop = declaration.body
    depth = 0
    for i in range(start, stop):
        depth += (tokens[i].text == "{") - (tokens[i].text == "}")
        if is_threadgroup_variable(tokens, i) and not (declaration.is_kernel and depth == 0):
            yield _at(tokens[i], "a threadgroup variable that is not at the top of a kernel's body")
        if _declares_plain_pointer(tokens, i):
            yield _at(tokens[i], "a pointer or reference without an address space")


def _argument(parameter: list[Token], refers: bool, taken: set[str]) -> Iterator[Finding]:
    """A kernel's; `taken` holds the buffer indices of those before it."""
    marks = {name.text: text_of(argument) for name, argument in attributes(parameter)}
    if refers and not marks.keys() & {"buffer", "threadgroup"}:
        yield _at(parameter[0], f"{text_of(parameter)}: no [[buffer(n)]]")
    index = marks.get("buffer")
    if index is None or "function_constant" in marks:
        return
    if index in taken:
        yield _at(parameter[0], f"{text_of(parameter)}: buffer({index}) is taken")
    if index.isdigit() and int(index) >= BUFFERS:
        yield _at(parameter[0], f"{text_of(parameter)}: buffers are numbered up to {BUFFERS - 1}")
    taken.add(index)


def _declares_plain_pointer(tokens: Sequence[Token], i: int) -> bool:
    """Whether a statement `T* name = …` begins at `i`. An unused product would look like one."""
    if tokens[i].kind != "word" or tokens[i - 1].text not in (";", "{", "}", ")", "("):
        return False
    if tokens[i].text == "const":
        i += 1
    if tokens[i].kind != "word" or tokens[i].text in (*SPACES, "return", "else"):
        return False
    i += 1
    while tokens[i].text == "::":
        i += 2
    if tokens[i].text == "<":
        try:
            i = matching_angle(tokens, i) + 1
        except SourceError:  # it compares
            return False
    if tokens[i].text == "const":
        i += 1
    if tokens[i].text not in ("*", "&"):
        return False
    return tokens[i + 1].kind == "word" and tokens[i + 2].text in ("=", ";")


# What clang says

MESSAGE = re.compile(r"(.*?):(\d+):\d+: (error|note): (.*)")
DEFINED = re.compile(r'define .*?@"?([\w.$]+)"?\(')
CALLED = re.compile(r'call .*?@"?([\w.$]+)"?\(')


def _compile(tokens: Sequence[Token], experiment: bool) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        code, output = Path(folder, "lint.cpp"), Path(folder, "lint.ll")
        code.write_text(f'#include "metal_lint.h"\n{rewritten(tokens)}\n', "utf-8")
        flags = ["-std=c++17", "-nostdinc", f"-I{HEADERS}", "-w", "-ferror-limit=0"]
        flags += ["-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
        flags += ["-DMETAL_LINT_EXPERIMENT"] if experiment else []
        # Neither optimised nor even inlined: all calls are still there.
        flags += ["-S", "-emit-llvm", "-O0", "-Xclang", "-disable-llvm-passes"]
        try:
            build.run([*flags, str(code), "-o", str(output)])
        except build.CompileError as error:
            return _errors(str(error))
        return _recursion(output.read_text("utf-8"))


def _errors(messages: str) -> list[Finding]:
    """An error inside the header, as of an assertion, is that of whoever instantiates it."""
    findings: list[Finding] = []
    pending = ""
    for match in MESSAGE.finditer(messages):
        file, line, kind, message = Path(match[1]).name, match[2], match[3], match[4]
        if kind == "error":
            pending = message
        if pending and file != "metal_lint.h":
            findings.append(Finding(f"{file}:{line}", pending))
            pending = ""
    return findings or [Finding("clang", messages)]


def _recursion(code: str) -> list[Finding]:
    """A cycle in the calls of LLVM's textual form, where every overload has its own name."""
    calls: dict[str, set[str]] = {}
    function = ""
    for line in code.splitlines():
        if match := DEFINED.match(line):
            function = match[1]
            calls[function] = set()
        elif match := CALLED.search(line):
            calls[function].add(match[1])
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        names = " calls ".join(map(_plain_name, error.args[1]))
        return [Finding("calls", f"recursion, which Metal does not have: {names}")]
    return []


def _plain_name(mangled: str) -> str:
    match = re.match(r"_ZL?(\d+)", mangled)
    return mangled[match.end() :][: int(match[1])] if match else mangled
