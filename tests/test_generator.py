"""Text from a model: the cache is an economy that nobody notices, and drawing is fair."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from generation import GREEDY, NO_END, answers, make, sequences
from krnl.answering import answer
from krnl.backends.base import Backend
from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, F32
from krnl.errors import ConfigError, DataError
from krnl.generator import (
    PROMPT_TOKENS,
    SLOTS,
    Request,
    Sampling,
    Token,
    answer_all,
    choose,
    open_generator,
)
from krnl.model import Model
from krnl.options import GenerateOptions
from runs import write_chat_model, write_rows
from tiny import MODELS, REFERENCE, VOCABULARY, write_model
from tiny_tokenizers import byte_level, wrap


@pytest.fixture(scope="module", params=sorted(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in MODELS}


@pytest.fixture(scope="module")
def backends() -> list[Backend]:
    return [REFERENCE, CpuBackend()]


def test_reading_piece_by_piece_is_reading_at_once(models, kind):
    """In float64: prompts in two and in many pieces, then token by token, against no cache."""
    model, (tokens,) = models[kind], sequences(40)
    whole = make(model, REFERENCE, 40, picks=40).read_whole(tokens)
    for cuts in ([39], [1, 2], [17, 18, 30], list(range(1, 40))):
        generator = make(model, REFERENCE, 40)
        for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
            single = stop - start == 1
            piece = tokens[start:stop]
            logits = generator._run(single, piece, [(0, start, stop - start)], [stop - start - 1])
            # The order of sums is another, over the few dozen terms of these products: some hundred
            # errors of 2⁻⁵³, which two layers pass on.
            assert np.abs(logits[0] - whole[stop - 1]).max() < 1e-12 * np.abs(whole).max()


def test_on_the_device_too(models, kind):
    model, cpu, (tokens,) = models[kind], CpuBackend(), sequences(40)
    want = make(model, REFERENCE, 40, picks=40).read_whole(tokens)
    for activation, ulps in ((F32, 400), (BF16, 60)):
        generator = make(model, cpu, 40, activation=activation)
        got = [generator._run(True, tokens[i : i + 1], [(0, i, 1)], [0])[0] for i in range(40)]
        assert np.abs(got - want).max() < ulps * activation.eps * np.abs(want).max()


@pytest.mark.parametrize("of_its_own", [False, True])
def test_a_table_in_the_hosts_memory(models, of_its_own):
    """Of a device with memory of its own; the answers are the same."""
    model, prompts, device = models["untied"], sequences(3, 17), CpuBackend()
    device.limits = replace(device.limits, mapped_alignment=None, own_memory=of_its_own)
    generator = make(model, device, 30, slots=2)
    table = model.checkpoint.tensors["model.embed_tokens.weight"].nbytes
    assert generator._memory._layout.hosted == (table if of_its_own else 0)
    assert answers(generator, prompts, 9) == answers(
        make(model, CpuBackend(), 30, slots=2), prompts, 9
    )


def test_a_window_forgets(models):
    """Beyond the reach of two layers of five tokens, what was said does not matter."""
    model, (tokens,) = models["window"], sequences(30)
    other = tokens.copy()
    other[:20] = (other[:20] + 7) % VOCABULARY
    generator = make(model, REFERENCE, 30, picks=30)
    one, two = generator.read_whole(tokens)[-1], generator.read_whole(other)[-1]
    assert np.array_equal(one, two)
    other[21] = (other[21] + 7) % VOCABULARY
    assert not np.array_equal(one, generator.read_whole(other)[-1])


def reread(model: Model, backend: Backend, prompt: np.ndarray, longest: int) -> list[int]:
    """Greedy answers, reading everything anew for every token."""
    tokens = prompt
    for _ in range(longest):
        generator = make(model, backend, len(tokens), picks=len(tokens))
        tokens = np.append(tokens, np.argmax(generator.read_whole(tokens)[-1])).astype(np.int32)
    return [int(token) for token in tokens[len(prompt) :]]


def test_greedy_answers_are_those_without_a_cache(models, kind, backends):
    for backend in backends:
        (prompt,) = sequences(9)
        got = answers(make(models[kind], backend, 20), [prompt], 11)[0]
        assert got == reread(models[kind], backend, prompt, 11)


def test_many_slots_answer_as_one_does(models, kind, backends):
    """More prompts than slots, of very different lengths, drawn and greedy."""
    model, prompts = models[kind], sequences(3, 17, 1, 30, 8, 2, 25)
    for backend in backends:
        for sampling in (GREEDY, Sampling(1.0, 0.9, seed=4)):
            together = answers(make(model, backend, 50, slots=3), prompts, 12, sampling)
            alone = []
            for number in range(len(prompts)):
                # Prompt number n draws from stream n, so it keeps its number.
                short = [p if i == number else p[:1] for i, p in enumerate(prompts)]
                alone.append(answers(make(model, backend, 50), short, 12, sampling)[number])
            assert together == alone


def test_a_slot_is_clean_when_it_is_used_again(models, backends):
    prompts = sequences(20, 3, 20, 3)
    for backend in backends:
        generator = make(models["llama"], backend, 40)
        first = answers(generator, prompts, 10)
        assert first == answers(generator, prompts, 10)
        assert first[1:2] == answers(generator, prompts[1:2], 10)


def test_prompts_longer_than_a_pass(models):
    """A prompt that takes two passes beside some that are done before it."""
    lengths = (PROMPT_TOKENS + 57, 5, 2 * PROMPT_TOKENS + 1, PROMPT_TOKENS)
    prompts, model = sequences(*lengths), models["smollm3"]
    generator = make(model, REFERENCE, 600, slots=4)
    got = answers(generator, prompts, 3)
    for prompt, found in zip(prompts, got, strict=True):
        assert found == answers(make(model, REFERENCE, 600), [prompt], 3)[0]


def test_what_ends_an_answer(models):
    model, (prompt,) = models["llama"], sequences(6)
    generator = make(model, REFERENCE, 40)
    free = answers(generator, [prompt], 20)[0]
    end = free[4]
    tokens = list(generator.stream([prompt], 20, frozenset({end}), GREEDY))
    assert [t.id for t in tokens] == free[: free.index(end) + 1]
    assert [t.stopped for t in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert tokens[-1].stopped == "end"
    assert [t.stopped for t in generator.stream([prompt], 3, NO_END, GREEDY)][-1] == "length"
    # The context ends: its last token is read, and what follows it is still an answer.
    short = make(model, REFERENCE, 10)
    tokens = list(short.stream([prompt], 20, NO_END, GREEDY))
    assert (len(tokens), tokens[-1].stopped) == (5, "length")
    assert [t.id for t in tokens] == free[:5]


def test_prompts_that_cannot_be_answered(models):
    generator = make(models["llama"], REFERENCE, 10)
    with pytest.raises(DataError, match="Prompt 2 is empty"):
        list(generator.stream(sequences(3, 0), 5, NO_END, GREEDY))
    with pytest.raises(DataError, match=r"Prompt 1 has 10 tokens; .* the limit is 9"):
        list(generator.stream(sequences(10), 5, NO_END, GREEDY))
    model = models["llama"]
    with pytest.raises(DataError, match=r"256 tokens; .* limit of this model is 255"):
        open_generator(model, None, REFERENCE, F32, Request(sequences(256)))
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        open_generator(model, None, REFERENCE, F32, Request(sequences(3), 0))
    assert (
        len(
            answers(
                open_generator(model, None, REFERENCE, F32, Request(sequences(255))),
                sequences(255),
                9,
            )[0]
        )
        == 2
    )


def test_the_first_of_equals_is_taken():
    random = np.random.default_rng(0)
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert choose(logits, GREEDY, random) == 1
    assert choose(np.zeros(7, np.float32), GREEDY, random) == 0
    # Of equals on the border of top_p the first ones are kept.
    kept = {choose(np.zeros(4, np.float32), Sampling(1.0, 0.5), random) for _ in range(200)}
    assert kept == {0, 1}


DRAWS = 20_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
def test_drawing_follows_the_distribution(temperature, top_p):
    rng = np.random.default_rng([int(10 * temperature), int(10 * top_p)])
    logits = (2 * rng.normal(size=12)).astype(np.float32)
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    size = next(n for n in range(1, 13) if n == 12 or p[order[:n]].sum() >= top_p)
    want = np.zeros(12)
    want[order[:size]] = p[order[:size]] / p[order[:size]].sum()
    sampling = Sampling(temperature, top_p)
    counts = np.bincount([choose(logits, sampling, rng) for _ in range(DRAWS)], minlength=12)
    assert not counts[want == 0].any()
    # Five standard deviations: a fair draw misses them once in a million.
    deviation = np.sqrt(want * (1 - want) / DRAWS)
    assert (np.abs(counts / DRAWS - want) <= 5 * deviation + 1e-12).all()


def test_extremes_of_temperature():
    random = np.random.default_rng(1)
    logits = np.array([1, 5, 4.9, -80, 88], np.float32)
    for temperature in (1e-300, 1e-5, 1e-2):
        assert choose(logits, Sampling(temperature), random) == 4
    assert len({choose(logits, Sampling(99.0), random) for _ in range(300)}) > 3
    assert choose(logits, Sampling(50.0, 1e-9), random) == 4


def test_the_seed_decides(models):
    model, prompts = models["llama"], sequences(5, 5, seed=1)
    prompts = [prompts[0], prompts[0]]

    def draw(seed: int) -> list[list[int]]:
        return answers(make(model, REFERENCE, 40, slots=2), prompts, 20, Sampling(1.0, 1.0, seed))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    one, other = draw(3)
    assert one != other, "each prompt draws from its own stream"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 100.0}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_p": float("nan")}, "top_p"), ({"seed": -1}, "seed"),
        ({"temperature": "0"}, "temperature"), ({"top_p": None}, "top_p"), ({"seed": 1.5}, "seed"),
    ],
)  # fmt: skip
def test_sampling_that_makes_no_sense(given, name):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        Sampling(**given)


class Script:
    """Stands in for a generator: says what it was told to."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def stream(self, *unused: Any) -> Iterator[Token]:
        for place, token in enumerate(self.tokens, 1):
            yield Token(0, token, "length" if place == len(self.tokens) else None)


def test_text_comes_in_whole_characters():
    """Each byte is a token, so a character arrives in up to four of them."""
    tokenizer = wrap(byte_level())
    text = "naïve 🦊 日本 e\u0301 ✓"
    ids = [int(i) for i in tokenizer.encode(text).ids]
    speaker: Any = SimpleNamespace(tokenizer=tokenizer)
    for end in range(1, len(ids) + 1):
        steps = list(answer_all(Script(ids[:end]), speaker, Request([np.zeros(1)])))  # type: ignore[arg-type]
        pieces = [piece for _, piece, _ in steps]
        assert all("\ufffd" not in piece for piece in pieces[:-1])
        whole = steps[-1][2]
        assert whole is not None
        assert whole.text == "".join(pieces)
        assert whole.text.rstrip("\ufffd") == text[: len(whole.text.rstrip("\ufffd"))]
    assert whole.text == text


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


def conversations(count: int) -> list[dict[str, Any]]:
    def turns(i: int) -> list[tuple[str, str]]:
        asks = [("user", "bear " * (i % 7 + 1)), ("assistant", "calm")]
        return asks * (1 + i % 2)

    return [{"messages": [{"role": r, "content": c} for r, c in turns(i)]} for i in range(count)]


def test_conversations_are_answered_in_their_order(tmp_path, chat_model, capsys):
    count = SLOTS + 5
    path = write_rows(tmp_path / "chats.jsonl", conversations(count))
    options: dict[str, Any] = {"model": str(chat_model), "max_tokens": 6, "precision": "fp32"}
    answer(GenerateOptions(messages=str(path), answer_last=True, json=True, **options))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == count
    assert all(list(line) == ["answer", "tokens", "stopped"] for line in lines)
    assert all(line["tokens"] == 6 or line["stopped"] == "end" for line in lines)
    for number in (0, 6, count - 1):
        alone = write_rows(tmp_path / "one.jsonl", [conversations(count)[number]])
        answer(GenerateOptions(messages=str(alone), answer_last=True, json=True, **options))
        assert json.loads(capsys.readouterr().out) == lines[number]


def test_a_conversation_that_waits_for_an_answer(tmp_path, chat_model, capsys):
    """It is the one that --answer-last makes of one that has been answered."""
    row = conversations(1)[0]
    answered = write_rows(tmp_path / "answered.jsonl", [row])
    waiting = write_rows(tmp_path / "waiting.jsonl", [{"messages": row["messages"][:-1]}])
    options: dict[str, Any] = {"model": str(chat_model), "max_tokens": 5}
    answer(GenerateOptions(messages=str(answered), answer_last=True, **options))
    first = capsys.readouterr().out
    answer(GenerateOptions(messages=str(waiting), **options))
    second = capsys.readouterr().out
    answer(GenerateOptions(prompt=row["messages"][0]["content"], **options))
    assert first == second == capsys.readouterr().out


def test_plain_text_is_continued_as_it_is(chat_model, capsys):
    options: dict[str, Any] = {
        "model": str(chat_model),
        "max_tokens": 5,
        "prompt": "One cold evening",
    }
    answer(GenerateOptions(raw=True, **options))
    raw = capsys.readouterr().out
    answer(GenerateOptions(**options))
    assert raw != capsys.readouterr().out


def test_precisions_are_told_apart(chat_model, capsys):
    """bf16 activations answer much as float32 does: here, for the first tokens, exactly."""
    said = set()
    for precision in ("fp32", "bf16"):
        options = GenerateOptions(
            str(chat_model), "bear", max_tokens=4, precision=precision, json=True
        )  # type: ignore[arg-type]
        answer(options)
        said.add(capsys.readouterr().out)
    assert len(said) == 1


def test_output_is_flushed_piece_by_piece(chat_model, monkeypatch):
    """A reader at the other end of a pipe sees every token when it comes."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Pipe())
    answer(GenerateOptions(str(chat_model), "bear", max_tokens=6, precision="fp32"))
    assert len({text for text in written if text}) > 2
