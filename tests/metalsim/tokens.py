"""Tokens of preprocessed Metal source, and how brackets in them match."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<mark>^[ \t]*\#[^\n]*)                       # a line mark or pragma; always a whole line
  | (?P<space>\s+)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
  | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
  | (?P<sign>::|->|\+\+|--|<<=|>>=|&&|\|\||[-+*/%&|^=!<>]=|<<|.)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
LINE_MARK = re.compile(r'\s*#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"')
CLOSING = {"(": ")", "[": "]", "{": "}"}


class SourceError(ValueError):
    """What is wrong with a Metal source, and where: `file.metal:12: …`."""


@dataclass(frozen=True)
class Token:
    """One token, with the white space, line marks and pragmas that stand before it."""

    kind: str
    text: str
    before: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def tokenize(text: str, file: str) -> list[Token]:
    """Tokens of `text`; the last is an empty one that holds what stands behind all others."""
    tokens: list[Token] = []
    before, line = "", 1
    for match in TOKEN.finditer(text):
        kind, word = str(match.lastgroup), match.group()
        if kind in ("mark", "space"):
            before += word
            mark = LINE_MARK.match(word) if kind == "mark" else None
            if mark:  # it names the line that follows it
                line, file = int(mark[1]) - 1, mark[2]
            line += word.count("\n")
            continue
        tokens.append(Token(kind, word, before, file, line))
        before = ""
        line += word.count("\n")
    tokens.append(Token("end", "", before, file, line))
    return tokens


def matching(tokens: Sequence[Token], start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    opening = tokens[start].text
    closing, depth = CLOSING[opening], 0
    for i in range(start, len(tokens)):
        if tokens[i].text == opening:
            depth += 1
        elif tokens[i].text == closing:
            depth -= 1
            if depth == 0:
                return i
    raise SourceError(f"{tokens[start].place}: this {opening} is never closed.")


def opens_angle(tokens: Sequence[Token], i: int) -> bool:
    """Whether token i is the `<` of template arguments: not that of sizeof(T) < 8."""
    return tokens[i].text == "<" and i > 0 and tokens[i - 1].kind == "word"


def matching_angle(tokens: Sequence[Token], start: int) -> int:
    """Index of the `>` that closes the template argument list opened by the `<` at `start`."""
    depth, i = 1, start + 1
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = matching(tokens, i)
        elif opens_angle(tokens, i):
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        elif text == ";":
            break
        i += 1
    raise SourceError(f"{tokens[start].place}: this < is never closed.")


def is_attribute(tokens: Sequence[Token], i: int) -> bool:
    return tokens[i].text == "[" and tokens[i + 1].text == "[" and not tokens[i + 1].before


def attributes(tokens: Sequence[Token]) -> Iterator[tuple[Token, list[Token]]]:
    """Every attribute inside `[[…]]` and the tokens of its argument: buffer(3), position, …"""
    i = 0
    while i + 1 < len(tokens):
        if not is_attribute(tokens, i):
            i += 1
            continue
        end = matching(tokens, i)
        for part in split(tokens[i + 2 : end - 1]):
            yield part[0], part[2:-1]
        i = end + 1


def without_attributes(tokens: Sequence[Token]) -> list[Token]:
    kept, i = [], 0
    while i < len(tokens):
        if i + 1 < len(tokens) and is_attribute(tokens, i):
            i = matching(tokens, i) + 1
        else:
            kept.append(tokens[i])
            i += 1
    return kept


def split(tokens: Sequence[Token]) -> list[list[Token]]:
    """The parts between commas that are in no bracket of any kind, `<…>` included."""
    parts: list[list[Token]] = [[]]
    angles, i = 0, 0
    while i < len(tokens):
        text = tokens[i].text
        end = matching(tokens, i) if text in CLOSING else i
        if text == "," and angles == 0:
            parts.append([])
        else:
            angles += opens_angle(tokens, i) - (text == ">")
            parts[-1].extend(tokens[i : end + 1])
        i = end + 1
    return [part for part in parts if part]


def text_of(tokens: Sequence[Token]) -> str:
    """The tokens in one line, for messages and names. Line marks and pragmas are left out."""
    words: list[str] = []
    for token in tokens:
        words.append((" " if words and token.before else "") + token.text)
    return "".join(words)
