"""Text from a model, with or without an adapter. Many prompts are answered together, each in a slot
of one cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from krnl.backends.base import Backend
from krnl.dtypes import DType
from krnl.errors import ConfigError, DataError, FormatError
from krnl.formats.peft import AdapterConfig, Modules
from krnl.model import Model, adapter_shapes
from krnl.models.decoder import Decoder
from krnl.models.generation_programs import GenerationPrograms
from krnl.models.inputs import fill
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer

# Tokens that a pass over prompts reads at once, and prompts that are answered side by side.
PROMPT_TOKENS = 256
SLOTS = 16


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the most likely one at temperature 0, else from the smallest set
    of tokens whose probabilities reach top_p (Holtzman et al. 2020). Each prompt draws from its own
    stream of the seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if type(value := getattr(self, name)) not in (int, float):
                raise ConfigError(f"{name} is {value!r}; it must be a number.")
        if type(self.seed) is not int:
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number.")
        if not 0 <= self.temperature < 100:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be at least 0 and below 100."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0.")


@dataclass(frozen=True)
class Token:
    """One generated token of prompt number `prompt`. `stopped` says why it was the last one, if it
    was: `end` (an end token, which is no part of the text) or `length`."""

    prompt: int
    id: int
    stopped: Literal["end", "length"] | None


@dataclass
class _Slot:
    """A prompt being answered."""

    prompt: int
    pending: np.ndarray  # tokens still to be read
    random: np.random.Generator
    length: int = 0  # tokens in the cache
    answered: int = 0


class Generator:
    """A model ready to read and continue up to `slots` sequences of up to `context` tokens each."""

    def __init__(
        self,
        model: Model,
        adapter: tuple[AdapterConfig, Modules] | None,
        backend: Backend,
        activation: DType,
        context: int,
        slots: int = 1,
        picks: int | None = None,
    ):
        """`picks`: of how many tokens a pass over prompts can give the logits; by default one for
        each slot."""
        config, modules = adapter if adapter is not None else (None, {})
        shapes = adapter_shapes(config, tuple(modules)) if config is not None else {}
        weights = model.weights(backend.limits.mapped_alignment)
        decoder = Decoder(model.config, weights, shapes, activation)
        self.context, self.slots = context, slots
        programs = GenerationPrograms(decoder, slots * context)
        prompt_step, self._prompt_inputs, self._prompt_logits = programs.read(
            "prompt", PROMPT_TOKENS, picks or slots
        )
        next_step, self._next_inputs, self._next_logits = programs.read("next", slots, slots)
        prompt_plan, next_plan = plan(
            [prompt_step, next_step],
            backend.kernels,
            backend.limits.largest_block,
            backend.limits.own_memory,
        )
        self._memory = backend.allocate(prompt_plan.layout)
        model.fill(weights, self._memory)
        if modules:
            self._memory.write(decoder.trainable.compute, decoder.trainable.pack(modules))
        self._prompt_program = backend.compile(prompt_plan, self._memory)
        self._next_program = backend.compile(next_plan, self._memory)

    def stream(
        self,
        prompts: Sequence[np.ndarray],
        longest_answer: int,
        end_ids: frozenset[int],
        sampling: Sampling,
    ) -> Iterator[Token]:
        """Answers every prompt (token ids), yielding tokens as they come. A prompt that leaves no
        room for an answer in the context is a DataError."""
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise DataError(f"Prompt {number + 1} is empty.")
            if len(prompt) >= self.context:
                raise DataError(
                    f"Prompt {number + 1} has {len(prompt):,} tokens; with room for an answer the "
                    f"limit is {self.context - 1:,}."
                )
        waiting = list(range(len(prompts)))[::-1]
        slots: list[_Slot | None] = [None] * self.slots
        while waiting or any(slots):
            for index, slot in enumerate(slots):
                if slot is None and waiting:
                    number = waiting.pop()
                    random = np.random.Generator(
                        np.random.Philox(key=np.array([sampling.seed, number], np.uint64))
                    )
                    slots[index] = _Slot(number, np.asarray(prompts[number], np.int32), random)
            for index, logits in self._read(slots):
                slot = slots[index]
                assert slot is not None
                chosen = choose(logits, sampling, slot.random)
                slot.answered += 1
                full = slot.answered >= longest_answer or slot.length >= self.context
                stopped: Literal["end", "length"] | None = (
                    "end" if chosen in end_ids else "length" if full else None
                )
                yield Token(slot.prompt, chosen, stopped)
                slot.pending = np.array([chosen], np.int32)
                if stopped:
                    slots[index] = None

    def read_whole(self, tokens: np.ndarray) -> np.ndarray:
        """The logits after each of up to PROMPT_TOKENS tokens, float32 [n, vocabulary]."""
        return self._run(
            False, np.asarray(tokens, np.int32), [(0, 0, len(tokens))], list(range(len(tokens)))
        )

    def _read(self, slots: list[_Slot | None]) -> list[tuple[int, np.ndarray]]:
        """One pass over what is pending, as far as it fits. Returns slot and logits where a slot
        has caught up."""
        active = [(i, slot) for i, slot in enumerate(slots) if slot is not None]
        single = all(len(slot.pending) == 1 for _, slot in active)
        room = self.slots if single else PROMPT_TOKENS
        tokens: list[np.ndarray] = []
        rows: list[tuple[int, int, int]] = []  # slot, first position, count
        picks: list[tuple[int, int]] = []  # slot, token of this pass
        used = 0
        for index, slot in active:
            count = min(len(slot.pending), room - used)
            if count == 0:
                continue
            tokens.append(slot.pending[:count])
            rows.append((index, slot.length, count))
            slot.pending = slot.pending[count:]
            slot.length += count
            used += count
            if not len(slot.pending):
                picks.append((index, used - 1))
        logits = self._run(single, np.concatenate(tokens), rows, [token for _, token in picks])
        return [(index, logits[i]) for i, (index, _) in enumerate(picks)]

    def _run(
        self, single: bool, tokens: np.ndarray, rows: list[tuple[int, int, int]], picks: list[int]
    ) -> np.ndarray:
        i = self._next_inputs if single else self._prompt_inputs
        position = np.concatenate([first + np.arange(count) for _, first, count in rows])
        base = np.concatenate([np.full(count, slot * self.context) for slot, _, count in rows])
        values: list[tuple[Buffer, Any]] = [
            (i.live, [len(tokens)]),
            (i.live_picks, [len(picks)]),
            (i.tokens, tokens),
            (i.position, position),
            (i.row, base + position),
            (i.stop, base + position + 1),
            (i.pick, picks),
        ]
        for window, start in i.start.items():
            first = (
                np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
            )
            values.append((start, base + first))
        fed = np.zeros(i.whole.size, np.int32)
        fill(fed, values)
        self._memory.write(i.whole, fed)
        (self._next_program if single else self._prompt_program).run()
        logits = self._next_logits if single else self._prompt_logits
        return self._memory.read(logits.rows(0, len(picks)))


def choose(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """The next token from float32 logits [vocabulary]. FormatError if they are not finite."""
    if not np.isfinite(logits).all():
        raise FormatError(
            "The model's logits are not finite: the checkpoint or the adapter holds values that "
            "are no numbers, or too large ones."
        )
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), sampling.top_p)) + 1]
    cumulative = np.cumsum(p[kept])
    drawn = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(kept[min(drawn, len(kept) - 1)])


@dataclass
class Answer:
    """A whole answer: its text, how many tokens it took (an end token among them), and why it
    stopped."""

    text: str
    tokens: int
    stopped: Literal["end", "length"]


@dataclass(frozen=True)
class Request:
    """What is to be answered: prompts as token ids, the most tokens of an answer, how they are
    drawn."""

    prompts: Sequence[np.ndarray]
    longest_answer: int = 256
    sampling: Sampling = field(default_factory=Sampling)


def open_generator(
    model: Model,
    adapter: tuple[AdapterConfig, Modules] | None,
    backend: Backend,
    activation: DType,
    request: Request,
) -> Generator:
    """A generator just large enough for a request, within the positions that the model knows."""
    if type(request.longest_answer) is not int or request.longest_answer < 1:
        raise ConfigError(
            f"max_tokens is {request.longest_answer!r}; it must be a whole number, at least 1."
        )
    longest = max(len(prompt) for prompt in request.prompts)
    limit = model.config.max_positions
    if longest >= limit:
        raise DataError(
            f"A prompt has {longest:,} tokens; with room for an answer the limit of this model is "
            f"{limit - 1:,}."
        )
    context = min(longest + request.longest_answer, limit)
    return Generator(model, adapter, backend, activation, context, min(SLOTS, len(request.prompts)))


def answer_all(
    generator: Generator, model: Model, request: Request
) -> Iterator[tuple[int, str, Answer | None]]:
    """Answers as they come: prompt number, new text, and the whole answer with its last piece."""
    tokenizer = model.tokenizer
    streams = {n: tokenizer.stream() for n in range(len(request.prompts))}
    texts = dict.fromkeys(streams, "")
    counts = dict.fromkeys(streams, 0)
    for token in generator.stream(
        request.prompts, request.longest_answer, tokenizer.end_ids, request.sampling
    ):
        n = token.prompt
        counts[n] += 1
        piece = "" if token.stopped == "end" else streams[n].push(token.id)
        if token.stopped:
            piece += streams[n].finish()
        texts[n] += piece
        yield n, piece, Answer(texts[n], counts[n], token.stopped) if token.stopped else None
