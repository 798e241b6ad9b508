"""What the head of a declaration says: everything before its body, its value or its semicolon."""

from collections.abc import Sequence
from itertools import pairwise

from .tokens import Token, attributes, matching, matching_angle, opens_angle, without_attributes

SPACES = {"device", "threadgroup", "constant", "thread"}
RECORDS = {"struct", "class", "union", "enum"}
TAKES_PARENTHESES = {"__attribute__", "decltype", "alignas"}


def outside(head: Sequence[Token]) -> list[Token]:
    """Tokens outside parentheses, attributes and template arguments. Of parentheses, `)` stays."""
    kept: list[Token] = []
    i = 0
    while i < len(head):
        text = head[i].text
        if text in ("(", "["):
            i = matching(head, i)
            if text == "(":
                kept.append(head[i])
        elif opens_angle(head, i) and head[i - 1].text != "operator":
            i = matching_angle(head, i)
        else:
            kept.append(head[i])
        i += 1
    return kept


def kind_of(head: Sequence[Token]) -> str:
    """`record`, `function` or `other`, for what stands before a `{`."""
    texts = [token.text for token in outside(head)]
    if "=" in texts and "operator" not in texts:
        return "other"
    if ")" in texts and "enum" not in texts:
        return "function"
    return "record" if RECORDS & set(texts) else "other"


def ends_in_initializer(head: Sequence[Token]) -> bool:
    """Whether a `{` behind this head belongs to a constructor's list: `: a(x), b{…}`."""
    texts = [token.text for token in outside(head)]
    if ")" not in texts or ":" not in texts[texts.index(")") :]:
        return False
    return outside(head)[-1].kind == "word" and texts[-1] not in ("const", *SPACES)


def parameter_list(head: Sequence[Token]) -> int | None:
    """Index of the `(` that opens a function's parameters."""
    i = 0
    while i < len(head):
        text = head[i].text
        if text == "template" and i + 1 < len(head) and head[i + 1].text == "<":
            i = matching_angle(head, i + 1)
        elif text == "[":
            i = matching(head, i)
        elif text == "(":
            if i and head[i - 1].text not in TAKES_PARENTHESES:
                return i
            i = matching(head, i)
        i += 1
    return None


def name_of(head: Sequence[Token]) -> str:
    """Of the function or record that the head declares."""
    if kind_of(head) == "record":
        words = [token.text for token in outside(head) if token.kind == "word"]
        return next((name for word, name in pairwise(words) if word in RECORDS), "")
    opening = parameter_list(head)
    return head[opening - 1].text if opening else ""


def is_kernel(head: Sequence[Token]) -> bool:
    return any(token.text == "kernel" for token in outside(head)) or any(
        name.text == "kernel" for name, _ in attributes(head)
    )


def host_name(head: Sequence[Token]) -> str:
    """What [[host_name("…")]] says, or nothing."""
    for name, argument in attributes(head):
        if name.text == "host_name":
            return "".join(token.text[1:-1] for token in argument)
    return ""


def qualifies_method(tokens: Sequence[Token], i: int) -> bool:
    """Whether token i stands behind a parameter list: `f() const device`."""
    before = [token.text for token in tokens[max(i - 2, 0) : i]]
    return before[-1:] == [")"] or before == [")", "const"]


def without_spaces(head: Sequence[Token]) -> str:
    """The head without address spaces, attributes and names of parameters, in one spelling.

    Metal tells `f(device T *)` from `f(threadgroup T *)`. C++ does not, and one of them is enough:
    they are those with the same text here.
    """
    texts: list[str] = []
    depth = 0  # of parentheses
    head = without_attributes(head)
    for i, token in enumerate(head):
        depth += (token.text == "(") - (token.text == ")")
        text = "const" if token.text == "constant" else token.text
        following = head[i + 1].text if i + 1 < len(head) else ""
        before = head[i - 1] if i else None
        named = depth and before and (before.kind == "word" or before.text in ("*", "&", ">"))
        if token.text in SPACES - {"constant"} or (
            text != token.text and qualifies_method(head, i)
        ):
            continue
        if token.kind == "word" and named and following in (",", ")", "="):  # a parameter's name
            continue
        if text != "const" or texts[-1:] != ["const"]:
            texts.append(text)
    return " ".join(texts)
