"""Source pass: turns preprocessed Metal into C++ that the headers in include/ give a meaning to.

It works on tokens and knows only as much grammar as it needs: where declarations end, which of them
are kernels, and what the attributes of a kernel's parameters say. Types are never parsed; a C++
template deduces them from the kernel. What the pass puts in are these macros of include/kernel.h:

    METALSIM_FUNCTION_CONSTANT(type, name, index)     constant bool x [[function_constant(0)]];
    METALSIM_DERIVED_CONSTANT(type, name, value…)     constant bool y = x && z;
    METALSIM_THREADGROUP(type, name, dimensions)      threadgroup float tile[8][8];
    METALSIM_KERNEL(host name, parameters, bindings, threads, pointer…)     a kernel
    METALSIM_COLLECTIVE                               before functions that contain barriers
    METALSIM_LIBRARY(kernels, constants)              at the end, with their numbers

Lines keep their numbers, so messages of the compiler and of the checks name the Metal source.
"""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from .heads import (
    SPACES,
    ends_in_initializer,
    host_name,
    is_kernel,
    kind_of,
    name_of,
    qualifies_method,
    without_spaces,
)
from .kernels import Kernel, read_instantiation, read_kernel
from .tokens import (
    CLOSING,
    SourceError,
    Token,
    attributes,
    is_attribute,
    matching,
    matching_angle,
    split,
    text_of,
    tokenize,
    without_attributes,
)

# What threads must reach together. Functions with such calls are inlined in checked builds, for the
# engine knows a place in the source by the address of the call.
COLLECTIVE = re.compile(r"(threadgroup|simdgroup)_barrier$|(simd|quad)_[a-z]")
# It changes no result, makes code large, and may count with a macro.
UNROLL = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+(clang[ \t]+loop[ \t]+)?unroll.*$", re.MULTILINE)
DOUBLE = re.compile(
    r"(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+|0[xX][\da-fA-F.]+[pP][+-]?\d+"
)
VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|b?float)[234]|vec")


@dataclass(frozen=True)
class Function:
    """What a host finds by name: a kernel, or one instantiation of a kernel template.

    `constants` are the function constants that it may read, by name, whatever it calls.
    """

    host_name: str
    kernel: str
    constants: frozenset[str]


@dataclass(frozen=True)
class Constant:
    """A function constant. `needed` is false where is_function_constant_defined() asks for it."""

    name: str
    index: str
    type: str
    needed: bool = True


@dataclass
class Source:
    """A Metal source after the pass. `code` is C++."""

    code: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    threadgroup_variables: list[str] = field(default_factory=list)


def convert(text: str, file: str) -> Source:
    """Runs the pass over preprocessed `text`, which line marks may attribute to several files."""
    return _Pass(tokenize(text, file)).run()


class _Pass:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.source = Source()
        self.edits: dict[int, tuple[int, str]] = {}  # first token -> (end, text in its place)
        self.prepended: dict[int, str] = {}  # text before a token
        self.appended: dict[int, str] = {}  # text behind a token
        self.words: dict[str, set[str]] = {}  # of functions, types, constants: the words in them
        self.bodies: list[tuple[int, set[str]]] = []  # of functions that are no kernels
        self.hosts: list[tuple[str, str, AbstractSet[str]]] = []  # as Function, with words
        self.seen: set[tuple[int, str, str]] = set()  # declarations without address spaces

    def run(self) -> Source:
        self.declarations(0, len(self.tokens) - 1, scope=-1, in_record=False)
        for start, words in self.bodies:
            if any(COLLECTIVE.match(word) for word in self.reached(words)):
                self.prepended[start] = "METALSIM_COLLECTIVE "
        asked = {
            self.tokens[i + 2].text
            for i, token in enumerate(self.tokens[:-2])
            if token.text == "is_function_constant_defined"
        }
        source = self.source
        source.constants = [replace(c, needed=c.name not in asked) for c in source.constants]
        names = {constant.name for constant in source.constants}
        source.functions = [
            Function(host, kernel, frozenset(self.reached(words) & names))
            for host, kernel, words in self.hosts
        ]
        source.code = self.emit()
        return source

    def reached(self, words: AbstractSet[str]) -> set[str]:
        """These words, and those in every function, type and constant that they may name."""
        seen: set[str] = set()
        waiting = set(words)
        while waiting:
            word = waiting.pop()
            seen.add(word)
            waiting |= self.words.get(word, set()) - seen
        return seen

    # Declarations

    def declarations(self, start: int, end: int, scope: int, in_record: bool) -> None:
        """Walks the declarations of a namespace or record. `scope` is the index of its bracket."""
        i = start
        while i < end:
            text, following = self.tokens[i].text, self.tokens[i + 1]
            if text in ("public", "private", "protected") and following.text == ":":
                i += 2
            elif text in (";", "}"):
                i += 1
            elif text == "namespace" or (text == "inline" and following.text == "namespace"):
                i = self.namespace(i)
            elif text == "extern" and following.kind == "string":
                i += 3 if self.tokens[i + 2].text == "{" else 2
            else:
                i = self.declaration(i, end, scope, in_record)

    def namespace(self, i: int) -> int:
        while self.tokens[i].text not in ("{", ";"):
            i += 1
        if self.tokens[i].text == ";":  # an alias
            return i + 1
        close = matching(self.tokens, i)
        self.declarations(i + 1, close, scope=i, in_record=False)
        return close + 1

    def declaration(self, start: int, end: int, scope: int, in_record: bool) -> int:
        """Handles the declaration at `start`; returns where the next begins."""
        stop, has_body = self.end_of_head(start, end)
        head = self.tokens[start:stop]
        if has_body:
            return self.definition(start, stop, end, scope)
        if head[0].text == "template" and head[1].text != "<":
            self.instantiation(start, stop)
        elif in_record and self.is_repeated(head, scope, "declared"):
            self.replace(start, stop + 1, "")
        elif not in_record and any(token.text == "constant" for token in head):
            self.program_constant(start, stop)
        return stop + 1

    def definition(self, start: int, opening: int, end: int, scope: int) -> int:
        """A function or record with its body."""
        head = self.tokens[start:opening]
        close = after = matching(self.tokens, opening)
        if kind_of(head) == "record":
            while self.tokens[after].text != ";" and after < end:
                after += 1
        after += 1
        if self.is_repeated(head, scope, "defined"):
            self.replace(start, after, "")
            return after
        name = name_of(head)
        words = {token.text for token in self.tokens[start:after] if token.kind == "word"}
        self.words.setdefault(name, set()).update(words)
        if kind_of(head) == "record":
            self.declarations(opening + 1, close, scope=opening, in_record=True)
            if any(token.text == "union" for token in head):
                self.union(opening + 1, close, name)
            return after
        self.threadgroup_variables(opening + 1, close)
        if is_kernel(head):
            self.kernel(head, close, name)
        else:
            while self.tokens[start].text == "template" and self.tokens[start + 1].text == "<":
                start = matching_angle(self.tokens, start + 1) + 1
            self.bodies.append((start, words))
        return after

    def union(self, start: int, close: int, name: str) -> None:
        members = self.tokens[start:close]
        first = _up_to(members, ";", "=", "{", ",")
        has_vectors = any(VECTOR.fullmatch(token.text) for token in members)
        has_constructors = any(token.text == name for token in members)
        if has_vectors and first[-1].kind == "word" and name and not has_constructors:
            self.prepended[close] = f" METALSIM_UNION({name}, {first[-1].text}) "

    def end_of_head(self, start: int, end: int) -> tuple[int, bool]:
        """Where the head of a declaration ends, and whether the body of one follows there."""
        i = start
        while i < end:
            text = self.tokens[i].text
            if text in ("(", "["):
                i = matching(self.tokens, i)
            elif text == ";":
                return i, False
            elif text == "{":
                head = self.tokens[start:i]
                if kind_of(head) != "other" and not ends_in_initializer(head):
                    return i, True
                i = matching(self.tokens, i)
            i += 1
        return end, False

    def is_repeated(self, head: Sequence[Token], scope: int, how: str) -> bool:
        """Whether only address spaces tell this declaration from an earlier one in its scope."""
        if not any(token.text in SPACES for token in head):
            return False
        key = (scope, how, without_spaces(head))
        repeated = key in self.seen
        self.seen.add(key)
        return repeated

    def program_constant(self, start: int, end: int) -> None:
        """A function constant, or a constant whose value depends on some."""
        words = without_attributes(self.tokens[start:end])
        equals = next((i for i, token in enumerate(words) if token.text == "="), len(words))
        left = [t for t in words[:equals] if t.text not in ("constant", "const", "static")]
        value = words[equals + 1 :]
        if len(left) < 2 or left[-1].kind != "word":
            return
        name, kind = left[-1].text, text_of([t for t in left[:-1] if t.text != "constexpr"])
        for attribute, index in attributes(self.tokens[start:end]):
            if attribute.text == "function_constant":
                number = re.sub(r"\b0+(?=\d)", "", text_of(index))  # 08 is decimal in Metal
                self.source.constants.append(Constant(name, number, kind))
                text = f"METALSIM_FUNCTION_CONSTANT({kind}, {name}, {number})"
                self.replace(start, end + 1, text)
                return
        reached = self.reached({token.text for token in value})
        if any(constant.name in reached for constant in self.source.constants):
            self.words[name] = reached
            text = f"METALSIM_DERIVED_CONSTANT({kind}, {name}, {text_of(value)})"
            self.replace(start, end + 1, text)

    # Kernels

    def kernel(self, head: Sequence[Token], close: int, name: str) -> None:
        kernel = read_kernel(head, name, len(self.source.kernels))
        self.source.kernels.append(kernel)
        if kernel.template:
            text = kernel.companion if kernel.max_threads != "0" else ""
        else:
            host = host_name(head) or name
            self.add_function(host, name, {name}, kernel.place)
            text = kernel.registration(host, f"&{name}", kernel.max_threads)
        self.appended[close] = f" {text}"

    def instantiation(self, start: int, end: int) -> None:
        head = self.tokens[start:end]
        if is_kernel(head) or host_name(head):
            found = read_instantiation(head)
            kernel = found.kernel(self.source.kernels)
            self.add_function(found.host_name, kernel.name, found.words, found.place)
            self.replace(start, end + 1, found.registration(kernel))

    def add_function(self, host: str, kernel: str, words: AbstractSet[str], place: str) -> None:
        if any(host == known for known, *_ in self.hosts):
            raise SourceError(f"{place}: two kernels have the host name {host!r}.")
        self.hosts.append((host, kernel, words))

    # Bodies

    def threadgroup_variables(self, start: int, end: int) -> None:
        tokens = self.tokens
        for i in range(start, end):
            if tokens[i].text != "threadgroup" or tokens[i - 1].text not in (
                ";",
                "{",
                "}",
                ")",
                ":",
            ):
                continue
            stop = i
            while tokens[stop].text != ";":
                stop = matching(tokens, stop) if tokens[stop].text in CLOSING else stop
                stop += 1
            declarators = split(without_attributes(tokens[i + 1 : stop]))
            first = _up_to(declarators[0], "[", "=", "{")
            if any(token.text in ("*", "&", "(") for token in first):
                continue  # a pointer or reference to threadgroup memory
            kind = text_of(first[:-1])
            declarators[0] = declarators[0][len(first) - 1 :]
            variables = [self.threadgroup_variable(kind, d) for d in declarators]
            self.replace(i, stop + 1, " ".join(variables))

    def threadgroup_variable(self, kind: str, declarator: Sequence[Token]) -> str:
        """Initial values are left out: Metal has none for threadgroup memory."""
        name, *dimensions = _up_to(declarator, "=", "{")
        self.source.threadgroup_variables.append(name.text)
        return f"METALSIM_THREADGROUP(({kind}), {name.text}, {text_of(dimensions)})"

    # Output

    def replace(self, start: int, end: int, text: str) -> None:
        self.edits[start] = (end, text)

    def emit(self) -> str:
        out: list[str] = []
        tokens, i = self.tokens, 0
        while i < len(tokens):
            end, text = i + 1, None
            if i in self.edits:
                end, text = self.edits[i]
            elif i + 1 < len(tokens) and is_attribute(tokens, i):
                end, text = matching(tokens, i) + 1, ""
            elif tokens[i].text == "constant" and qualifies_method(tokens, i):
                text = ""  # it would become const
            out += (UNROLL.sub("", tokens[i].before), self.prepended.get(i, ""))
            if text is None:
                out.append(_spelled(tokens[i]))
            else:  # what stood there keeps its lines
                out += (text, *(token.before for token in tokens[i + 1 : end]))
            out.append(self.appended.get(i, ""))
            i = end
        return (
            "".join(out) + f"\nMETALSIM_LIBRARY({len(self.hosts)}, {len(self.source.constants)})\n"
        )


def _up_to(tokens: Sequence[Token], *texts: str) -> list[Token]:
    """Tokens before the first of `texts` that is in no template argument list."""
    i = 0
    while i < len(tokens) and tokens[i].text not in texts:
        i = matching_angle(tokens, i) if tokens[i].text == "<" else i
        i += 1
    return list(tokens[:i])


def _spelled(token: Token) -> str:
    """Literals in C++: without a suffix they would be double, which Metal does not have."""
    text = token.text
    if text == "double":
        raise SourceError(f"{token.place}: Metal has no double; use float.")
    if token.kind != "number":
        return text
    if DOUBLE.fullmatch(text):
        return f"{text}f"
    if not text.lower().startswith("0x") or "p" in text.lower():
        if text[-2:].lower() == "bf":
            return f"::metal::bfloat({_as_float(text[:-2])})"
        if text[-1] in "hH":
            return f"::metal::half({_as_float(text[:-1])})"
    return text


def _as_float(digits: str) -> str:
    return f"{digits}f" if DOUBLE.fullmatch(digits) else f"{digits}.0f"
