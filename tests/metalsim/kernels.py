"""Kernels, and the instantiations by which a source names the variants of a kernel template."""

from collections.abc import Sequence
from dataclasses import dataclass

from .bindings import Parameter, parameters
from .heads import host_name, parameter_list
from .tokens import (
    SourceError,
    Token,
    attributes,
    matching,
    matching_angle,
    split,
    text_of,
    without_attributes,
)

MAX_THREADS = "max_total_threads_per_threadgroup"


@dataclass(frozen=True)
class Kernel:
    """A kernel or kernel template. `number` tells it from others in the source.

    `template` is the template's parameter list with its word, `arity` how many they are.
    `max_threads` is an expression of C++, which may depend on them; "0" says nothing.
    """

    name: str
    number: int
    parameters: list[Parameter]
    template: str
    arity: int
    max_threads: str
    place: str

    @property
    def companion(self) -> str:
        """A variable template that holds max_threads for each instance."""
        return f"{self.template} constexpr int {self.companion_name} = {self.max_threads};"

    @property
    def companion_name(self) -> str:
        return f"metalsim_threads_{self.number}"

    def registration(self, host: str, pointer: str, max_threads: str) -> str:
        names = ", ".join([*(f'"{p.name}"' for p in self.parameters), "0"])
        tags = ", ".join(f"::metalsim::{p.binding}" for p in self.parameters)
        return f'METALSIM_KERNEL("{host}", ({names}), ({tags}), ({max_threads}), {pointer})'


def read_kernel(head: Sequence[Token], name: str, number: int) -> Kernel:
    """The kernel that is defined with this head."""
    opening = parameter_list(head)
    assert opening is not None
    bound = parameters(head[opening + 1 : matching(head, opening)], name)
    threads = [text_of(argument) for word, argument in attributes(head) if word.text == MAX_THREADS]
    template, arity = "", 0
    if head[0].text == "template":
        close = matching_angle(head, 1)
        template, arity = text_of(head[: close + 1]), len(split(head[2:close]))
    place = head[opening - 1].place
    return Kernel(name, number, bound, template, arity, threads[0] if threads else "0", place)


@dataclass(frozen=True)
class Instantiation:
    """template [[host_name("…")]] kernel void name<…>(…); also in decltype and typedef form.

    `arguments` is `<…>` of the template, or empty where they follow from `signature`, which is
    `(…)`. `words` are those that may name functions, types and constants.
    """

    host_name: str
    qualifiers: str
    name: str
    arguments: str
    arity: int
    signature: str
    words: frozenset[str]
    place: str

    @property
    def pointer(self) -> str:
        if self.arguments:
            return f"&{self.qualifiers}{self.name}{self.arguments}"
        return f"static_cast<void (*){self.signature}>(&{self.qualifiers}{self.name})"

    def kernel(self, kernels: Sequence[Kernel]) -> Kernel:
        """The kernel that is meant: of several with one name, the one that takes the arguments."""
        named = [k for k in kernels if k.name == self.name and k.arity >= self.arity]
        if named:
            return min(named, key=lambda k: k.arity)
        known = ", ".join(sorted({kernel.name for kernel in kernels})) or "none"
        raise SourceError(
            f"{self.place}: {self.name} is instantiated, but no kernel has that name. "
            f"Kernels so far: {known}."
        )

    def registration(self, kernel: Kernel) -> str:
        max_threads = "0"
        if kernel.max_threads != "0" and self.arguments:
            max_threads = f"{self.qualifiers}{kernel.companion_name}{self.arguments}"
        return kernel.registration(self.host_name, self.pointer, max_threads)


def read_instantiation(head: Sequence[Token]) -> Instantiation:
    words = [token for token in without_attributes(head[1:]) if token.text != "kernel"]
    if words[0].text == "decltype":  # decltype(name<…>) name<…>
        words = words[matching(words, 1) + 1 :]
    opening = next((i for i, token in enumerate(words) if token.text in ("<", "(")), 0)
    if opening == 0:
        raise SourceError(f"{head[0].place}: an instantiation of nothing: {text_of(head)}")
    first, name = opening - 1, words[opening - 1]
    while first >= 2 and words[first - 1].text == "::":
        first -= 2
    arguments: list[Token] = []
    if words[opening].text == "<":
        arguments = words[opening : matching_angle(words, opening) + 1]
    rest = arguments or words[opening:]
    return Instantiation(
        host_name(head) or f"{name.text}{text_of(rest)}",
        text_of(words[first : opening - 1]),
        name.text,
        text_of(arguments),
        len(split(arguments[1:-1])),
        "" if arguments else text_of(rest),
        frozenset({name.text, *(token.text for token in rest)}),
        name.place,
    )
