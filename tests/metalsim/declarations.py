"""Declarations at file scope, as our own Metal sources write them: no namespaces, no classes with
methods outside. The lint looks at a source through these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .tokens import (
    CLOSING,
    Token,
    attributes,
    is_attribute,
    matching,
    matching_angle,
    split,
    without_attributes,
)

SPACES = {"device", "threadgroup", "constant", "thread"}
RECORDS = {"struct", "class", "union", "enum"}


@dataclass(frozen=True)
class Declaration:
    """tokens[start:end], with the body of a function or record at tokens[body[0]:body[1]].

    `kind` is function, record, instantiation, variable or other.
    """

    kind: str
    start: int
    end: int
    head: list[Token]  # up to the body or semicolon, without attributes and template <…>
    marks: dict[str, list[Token]]  # attributes outside parameters, and their arguments
    body: tuple[int, int] | None = None

    @property
    def is_kernel(self) -> bool:
        return "kernel" in self.marks or any(token.text == "kernel" for token in self.head)

    @property
    def name(self) -> Token:
        """Of a function, record or variable."""
        stop = next((i for i, t in enumerate(self.head) if t.text in ("(", "[", "=")), None)
        return self.head[: stop or len(self.head)][-1]


def declarations(tokens: Sequence[Token]) -> Iterator[Declaration]:
    """`tokens` end with the empty one that tokenize() puts there."""
    start = 0
    while start < len(tokens) - 1:
        if tokens[start].text == ";":
            start += 1
            continue
        declaration = _declaration(tokens, start)
        yield declaration
        start = declaration.end


def parameters(tokens: Sequence[Token], declaration: Declaration) -> list[list[Token]]:
    """Of a function with a body, with their attributes."""
    opening = next(i for i, token in enumerate(tokens) if token is declaration.name) + 1
    return split(tokens[opening + 1 : matching(tokens, opening)])


def is_threadgroup_variable(tokens: Sequence[Token], i: int) -> bool:
    """Whether a statement that declares one, and no pointer or reference, begins at `i`."""
    if tokens[i].text != "threadgroup" or tokens[i - 1].text not in (";", "{", "}", ")"):
        return False
    while tokens[i].text not in (";", "[", "="):
        if tokens[i].text in ("*", "&", "("):
            return False
        i = matching_angle(tokens, i) if tokens[i].text == "<" else i
        i += 1
    return True


def threadgroup_names(tokens: Sequence[Token], i: int) -> list[str]:
    """The names that the declaration at `i` declares."""
    stop = next(j for j in range(i, len(tokens)) if tokens[j].text == ";")
    names = []
    for part in split(without_attributes(tokens[i:stop])):
        end = next((j for j, t in enumerate(part) if t.text in ("[", "=")), len(part))
        names.append(part[end - 1].text)
    return names


def _declaration(tokens: Sequence[Token], start: int) -> Declaration:
    i, body, record = start, None, False
    while tokens[i].text != ";" and tokens[i].kind != "end":
        if tokens[i].text == "{" and body is None and tokens[i - 1].text != "=":
            close = matching(tokens, i)
            body = (i + 1, close)
            record = any(token.text in RECORDS for token in _outside(tokens[start:i]))
            if not record:
                i = close
                break
            i = close
        elif tokens[i].text in CLOSING:
            i = matching(tokens, i)
        i += 1
    head_end = body[0] - 1 if body else i
    head = _without_gnu(without_attributes(tokens[start:head_end]))
    marks = {name.text: argument for name, argument in attributes(_outside(tokens[start:head_end]))}
    instantiation = head[0].text == "template" and head[1].text != "<"
    while head[0].text == "template" and not instantiation:
        head = head[matching_angle(head, 1) + 1 :]
    texts = [token.text for token in head]
    if instantiation:
        kind = "instantiation"
    elif record:
        kind = "record"
    elif body:
        kind = "function"
    elif texts[0] in ("using", "typedef", "static_assert", *RECORDS) or (
        "(" in texts and "=" not in texts[: texts.index("(")]
    ):
        kind = "other"
    else:
        kind = "variable"
    return Declaration(kind, start, i + 1, head, marks, body)


def _without_gnu(tokens: Sequence[Token]) -> list[Token]:
    """Without __attribute__((…)), which METAL_FUNC stands for."""
    kept: list[Token] = []
    i = 0
    while i < len(tokens):
        if tokens[i].text == "__attribute__":
            i = matching(tokens, i + 1)
        else:
            kept.append(tokens[i])
        i += 1
    return kept


def _outside(tokens: Sequence[Token]) -> list[Token]:
    """Without what stands in parentheses, except in attributes."""
    kept: list[Token] = []
    i = 0
    while i < len(tokens):
        end = i
        if tokens[i].text == "(":
            end = matching(tokens, i)
        elif i + 1 < len(tokens) and is_attribute(tokens, i):
            end = matching(tokens, i)
            kept += tokens[i : end + 1]
        else:
            kept.append(tokens[i])
        i = end + 1
    return kept
