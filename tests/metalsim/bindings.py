"""What the attributes of a kernel's parameters bind them to."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from .tokens import SourceError, Token, attributes, split, text_of, without_attributes

POSITIONS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "dispatch_threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "grid_origin",
    "grid_size",
)
# Attributes that bind a parameter, and their tags in include/kernel.h.
TAGS = {
    "buffer": "buffer",
    "threadgroup": "threadgroup_buffer",
    **dict.fromkeys(POSITIONS, "position"),
}
OTHERS = {"function_constant", "maybe_unused", "unused", "raster_order_group"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. `binding` is its tag in C++, such as buffer<0>."""

    name: str
    text: str
    binding: str
    place: str


def parameters(tokens: Sequence[Token], kernel: str) -> list[Parameter]:
    """What stands between the parentheses of a kernel. SourceError: an attribute is wrong."""
    parts = split(tokens)
    taken = {
        text_of(argument)
        for part in parts
        for name, argument in attributes(part)
        if name.text == "buffer"
    }
    return [_parameter(part, kernel, taken) for part in parts]


def _parameter(tokens: Sequence[Token], kernel: str, taken: set[str]) -> Parameter:
    """`taken` are the buffer indices that are spoken for; it grows."""
    where = f"{tokens[0].place}: parameter `{text_of(tokens)}` of kernel {kernel}"
    binding = condition = ""
    for name, argument in attributes(tokens):
        if name.text == "function_constant":
            condition = text_of(argument)
        if name.text not in OTHERS:
            if binding:
                raise SourceError(f"{where} has two bindings.")
            binding = _binding(name.text, text_of(argument), where)
    words = without_attributes(tokens)
    if not binding:
        if not any(token.text in ("*", "&", "[") for token in words):
            raise SourceError(
                f"{where} has no attribute that says what it is bound to, "
                "such as [[buffer(0)]] or [[thread_position_in_grid]]."
            )
        index = next(i for i in range(len(taken) + 1) if str(i) not in taken)
        taken.add(str(index))  # Metal numbers them in order
        binding = f"buffer<{index}>"
    if condition:
        binding = f"only_if<&{condition}, ::metalsim::{binding}>"
    dimensions = next((i for i, token in enumerate(words) if token.text == "["), len(words))
    names = [token.text for token in words[:dimensions] if token.kind == "word"]
    return Parameter(names[-1], text_of(tokens), binding, tokens[0].place)


def _binding(word: str, index: str, where: str) -> str:
    if word not in TAGS:
        near = difflib.get_close_matches(word, TAGS, n=1)
        hint = f" Is {near[0]} meant?" if near else ""
        raise SourceError(f"{where} has the unknown attribute [[{word}]].{hint}")
    if bool(index) != (word in ("buffer", "threadgroup")):
        raise SourceError(f"{where}: [[{word}]] takes {'no' if index else 'an'} index.")
    return f"{TAGS[word]}<{index or f'::metalsim::{word}'}>"
