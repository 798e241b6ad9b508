"""Training examples: rows through the tokenizer, to ids and targets.

Each row is tokenised once and as a whole. What is a target is decided on characters and carried
over to tokens by their offsets: a token is a target if it shares at least one character with a
target span. So a token that straddles the start of an answer is trained.

In a conversation a target span is an assistant turn: everything that the model has to write after
the generation prompt, up to and including the special token that ends the turn. Of `prompt` and
`completion` it is the completion and the end of text, of `text` everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from krnl.data.rows import Chat, Plain, Row, read_rows, split
from krnl.data.template import Message
from krnl.data.tokenizer import Encoding, Tokenizer
from krnl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Example", "Examples", "Report", "Row", "TrainOn", "build", "read_rows", "show", "split"]

TrainOn = Literal["all-assistant", "last-assistant", "everything"]
Span = tuple[int, int]

_CHUNK = 1024  # rows tokenised at once: enough for every core, little enough to hold in memory


@dataclass(frozen=True, eq=False)
class Example:
    """A row as the model sees it: ids int32 [n]; targets bool [n].

    targets[i] says that token i is predicted (from the tokens before it) and counted; targets[0]
    is False. cut: whether --max-length took tokens from its end.
    """

    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]
    line: int
    cut: bool

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Report:
    """What was read. tokens and target_tokens count the examples that are trained on.

    longest: tokens of the longest row before cutting. rows_without_target are left out.
    ignored_keys: keys of rows that training does not use.
    """

    rows: int
    tokens: int
    target_tokens: int
    rows_cut: int
    tokens_cut: int
    rows_without_target: int
    longest: int
    ignored_keys: tuple[str, ...]

    @property
    def suggested_max_length(self) -> int:
        """The smallest multiple of 64 tokens that cuts no row."""
        return -(-self.longest // 64) * 64

    def describe(self, live_share: float | None = None) -> str:
        """The lines a run prints before its first step; `live_share` is what packing achieves."""
        cut = f"{self.rows_cut:,}"
        if self.rows_cut:
            enough = self.suggested_max_length
            cut += (
                f", {self.tokens_cut:,} tokens lost (--max-length {enough}, with as many --tokens "
                "or more, would cut none)"
            )
        share = self.target_tokens / max(1, self.tokens)
        without = f"{self.rows_without_target:,}"
        lines = [
            ("rows", f"{self.rows:,} (longest: {self.longest:,} tokens)"),
            ("tokens", f"{self.tokens:,}"),
            ("target tokens", f"{self.target_tokens:,} ({share:.1%})"),
            ("rows cut", cut),
            ("rows without target", without + " (left out)" * (self.rows_without_target > 0)),
        ]
        if live_share is not None:
            lines.append(("live tokens per pass", f"{live_share:.1%}"))
        if self.ignored_keys:
            lines.append(("keys not used", ", ".join(self.ignored_keys)))
        return "\n".join(f"{name:<22}{value}" for name, value in lines)


@dataclass(frozen=True, eq=False)
class Examples:
    """The rows to train on, in file order, and what became of the others."""

    examples: list[Example]
    report: Report

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Example:
        return self.examples[row]


def build(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    train_on: TrainOn = "all-assistant",
    max_length: int | None = None,
) -> Examples:
    """Tokenise `rows`, mark their targets and cut them to `max_length` tokens.

    train_on: of a conversation all assistant turns or the last one; "everything" is every token but
    the first, prompts included. Rows left without a target are counted and kept out. Raises
    DataError for a row that cannot be rendered and if no row has a target.
    """
    if train_on not in get_args(TrainOn):
        raise ConfigError(f"`train_on` is one of {', '.join(get_args(TrainOn))}, not {train_on!r}.")
    if max_length is not None and max_length < 2:
        raise ConfigError(f"`max_length` must be at least 2 tokens, not {max_length}.")
    if not rows:
        raise DataError("There are no rows to train on.")
    examples = []
    rows_cut = tokens_cut = longest = 0
    for whole in _examples(rows, tokenizer, train_on):
        longest = max(longest, len(whole))
        example = whole
        if max_length is not None and len(whole) > max_length:
            rows_cut += 1
            tokens_cut += len(whole) - max_length
            ids, targets = whole.ids[:max_length].copy(), whole.targets[:max_length].copy()
            example = Example(ids, targets, whole.line, cut=True)
        if example.targets.any():
            examples.append(example)
    if not examples:
        cut = (
            f" {rows_cut:,} were cut by --max-length {max_length}, which is --tokens where it is "
            f"not given; the longest has {longest:,} tokens."
            if rows_cut
            else ""
        )
        raise DataError(
            f"{rows[0].path}: none of its {len(rows):,} rows has a token to train on.{cut}"
        )
    return Examples(
        examples,
        Report(
            rows=len(rows),
            tokens=sum(len(example) for example in examples),
            target_tokens=sum(int(example.targets.sum()) for example in examples),
            rows_cut=rows_cut,
            tokens_cut=tokens_cut,
            rows_without_target=len(rows) - len(examples),
            longest=longest,
            ignored_keys=tuple(sorted({key for row in rows for key in row.ignored})),
        ),
    )


def show(example: Example, tokenizer: Tokenizer) -> "Text":
    """The example as text, its trained tokens in colour."""
    from rich.text import Text  # rich takes a while to import, and only --show needs it

    shown = Text()
    changes = np.flatnonzero(np.diff(example.targets)) + 1
    done = ""
    for stop in (*changes.tolist(), len(example)):
        # Decoded from the beginning each time: a decoder may treat a text's first token specially.
        text = tokenizer.decode(example.ids[:stop])
        shown.append(text[len(done) :], "bold green" if example.targets[stop - 1] else "dim")
        done = text
    return shown


def _examples(rows: Sequence[Row], tokenizer: Tokenizer, train_on: TrainOn) -> Iterator[Example]:
    """Every row, whole, in order."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, _CHUNK)):
        drawn = [_draw(row, tokenizer, train_on) for row in chunk]
        encodings = tokenizer.encode_batch([text for text, _ in drawn], add_special_tokens=False)
        for row, (_, spans), encoding in zip(chunk, drawn, encodings, strict=True):
            if isinstance(row, Plain):
                encoding = tokenizer.surround(encoding, end=True)
            yield Example(encoding.ids, _targets(encoding, spans), row.line, cut=False)


def _draw(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> tuple[str, list[Span]]:
    """The text of a row and its target spans, in characters."""
    try:
        if isinstance(row, Plain):
            text = row.prompt + row.completion
            spans = [(len(row.prompt), len(text) + 1)] if text else []
        else:
            text = tokenizer.render(row.messages, tools=row.tools)
            spans = [] if train_on == "everything" else _turns(row, tokenizer, text, train_on)
        text.encode()
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.where}: {text[error.start]!a} is half of a surrogate pair, not a character."
        ) from error
    return text, [(0, len(text) + 1)] if train_on == "everything" and text else spans


def _targets(encoding: Encoding, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """bool [n]: the tokens that share a character with a span, but never the first token.

    Tokens added around the text count as one character wide, so a span that goes one beyond the
    text holds those that end it.
    """
    starts, ends = encoding.offsets.T
    ends = np.maximum(ends, starts + 1)
    targets = np.zeros(len(encoding), np.bool_)
    for start, stop in spans:
        targets |= (ends > start) & (starts < stop)
    targets[:1] = False
    return targets


def _turns(row: Chat, tokenizer: Tokenizer, text: str, train_on: TrainOn) -> list[Span]:
    """The spans of the assistant turns to train, in the rendered conversation `text`."""
    turns = [i for i, m in enumerate(row.messages) if m["role"] == "assistant" and i >= row.first]
    if train_on == "last-assistant":
        turns = turns[-1:]
    spans: list[Span] = []
    for turn in turns:
        span = _turn(row, tokenizer, text, turn, after=spans[-1][1] if spans else 0)
        if span is None:
            raise DataError(
                f"the chat template does not show where message {turn + 1} begins and ends, so its "
                "tokens cannot be told from the others. Use `prompt` and `completion` strings, or "
                "train on everything."
            )
        spans.append(span)
    return spans


def _turn(row: Chat, tokenizer: Tokenizer, text: str, turn: int, after: int) -> Span | None:
    """Where message `turn` is written in `text`, its end token included, or None.

    Most templates write a conversation's beginning alike whatever follows. Then the turn lies
    between the rendered beginnings without it (plus the generation prompt) and with it.
    """

    def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return tokenizer.render(messages, add_generation_prompt, row.tools)
        except DataError:
            return None

    messages = row.messages
    prompt = render(messages[:turn], add_generation_prompt=True)
    start = None if prompt is None or not text.startswith(prompt) else len(prompt)
    if start is not None:
        upto = text if turn + 1 == len(messages) else render(messages[: turn + 1])
        if upto is not None and text.startswith(upto) and len(upto) >= start:
            written = upto.rstrip()
            ended = written.endswith(tokenizer.special_tokens) and len(written) > start
            return start, len(written if ended else upto)

    # Others look at the whole conversation (Qwen3 drops the thoughts of earlier turns) or refuse a
    # part of one. They are asked to render it with a mark in place of the message.
    mark = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in text)
    replaced: list[Message] = list(messages)
    replaced[turn] = {"role": "assistant", "content": mark}
    marked = render(replaced)
    if marked is None or marked.count(mark) != 1:
        return None
    head, tail = marked.split(mark)
    stop = len(text) - len(tail)
    if stop < after or not text.endswith(tail):
        return None
    if start is None:
        differing = (i for i, (a, b) in enumerate(zip(head, text, strict=False)) if a != b)
        common = min(next(differing, len(head)), stop)
        header = _generation_prompt(render, messages[:turn])
        found = text.rfind(header, after, common)
        start = common if found < 0 else found + len(header)
    return (start, tokenizer.turn_end(text, stop)) if after <= start <= stop else None


def _generation_prompt(
    render: Callable[[Sequence[Message], bool], str | None], messages: Sequence[Message]
) -> str:
    """What the template adds for the model to go on from, after `messages` or any question."""
    question: Message = {"role": "user", "content": "?"}
    for history in (messages, [question]):
        without, prompt = render(history, False), render(history, True)
        if without is not None and prompt is not None and prompt.startswith(without):
            return prompt[len(without) :]
    return ""
