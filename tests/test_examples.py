"""Examples: exactly the right tokens are targets, whatever the tokenizer and the template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from krnl.data.examples import Example, Report, build, read_rows, show
from krnl.data.rows import Chat, Plain, Row
from krnl.data.tokenizer import Tokenizer
from krnl.errors import ConfigError, DataError, FormatError
from tiny_tokenizers import (
    CHATML,
    DEFAULT_SYSTEM,
    LLAMA2,
    LLAMA3,
    PROMPTS_A_THOUGHT,
    THINKING,
    TWICE,
    UNENDED,
    WHOLE_ONLY,
    byte_level,
    sentencepiece,
    wrap,
)

HERE = Path("train.jsonl")
ROOT = Path(__file__).resolve().parents[1]
STORYTELLER = [
    folder
    for folder in (ROOT / "examples" / "storyteller", ROOT.parent / "shared" / "storyteller")
    if (folder / "model" / "tokenizer.json").is_file()
]

BYTES = wrap(byte_level(bos="<s>"), CHATML, bos="<s>", eos="</s>")


def chat(*contents: str, first: int = 0, **last: Any) -> Chat:
    """A conversation in which user and assistant take turns, the user first."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [
        {"role": roles[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    messages[-1].update(last)
    return Chat(HERE, 1, (), messages, first, None)


def plain(prompt: str, completion: str) -> Plain:
    return Plain(HERE, 1, (), prompt, completion)


def only(row: Row, tokenizer: Tokenizer, **settings: Any) -> Example:
    (example,) = build([row], tokenizer, **settings).examples
    assert not example.targets[0]
    return example


def trained(row: Row, tokenizer: Tokenizer, **settings: Any) -> list[str]:
    """The text of every run of targets."""
    example = only(row, tokenizer, **settings)
    edges = np.flatnonzero(np.diff(example.targets, prepend=False, append=False))
    return [
        tokenizer.decode(example.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


# Against the reference


@pytest.mark.skipif(not STORYTELLER, reason="the storyteller checkpoint is not here")
@pytest.mark.parametrize("name", ["train", "valid"])
def test_storyteller_equals_the_reference_recipe(name: str):
    """The reference run tokenised pieces on their own: role lines, answers with their end, ends of
    lines. Its special tokens make that the same as one tokenisation of the whole."""
    (folder, *_) = STORYTELLER
    backend = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    path = folder / "data" / f"{name}.jsonl"
    built = build(read_rows(path), Tokenizer.load(folder / "model"))
    conversations = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert len(built) == len(conversations)
    for example, messages in zip(built.examples, conversations, strict=True):
        ids: list[int] = []
        targets: list[bool] = []
        for message in messages:
            answer = message["role"] == "assistant"
            for piece, target in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", answer),
                ("\n", False),
            ):
                found = backend.encode(piece, add_special_tokens=False).ids
                ids += found
                targets += [target] * len(found)
        assert example.ids.tolist() == ids
        assert example.targets.tolist() == targets
    assert built.report.target_tokens == sum(int(e.targets.sum()) for e in built.examples)


# Conversations

LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\ue000"))
CONTENT = LETTERS | st.sampled_from(["🙂", "é\u0301👩‍👩‍👧", "\n", " a ", "<|im_end", "1 < 2"])


@given(st.lists(CONTENT, min_size=2, max_size=6))
def test_chatml_trains_the_answers_and_their_ends(contents: list[str]):
    row = chat(*contents)
    answers = [f"{answer}<|im_end|>" for answer in contents[1::2]]
    assert trained(row, BYTES) == answers
    assert trained(row, BYTES, train_on="last-assistant") == answers[-1:]
    whole = only(row, BYTES, train_on="everything")
    assert whole.targets[1:].all()
    assert BYTES.decode(whole.ids) == BYTES.render(row.messages)


@given(st.lists(CONTENT, min_size=2, max_size=6))
def test_default_system_prompt(contents: list[str]):
    tokenizer = wrap(byte_level(), DEFAULT_SYSTEM)
    assert trained(chat(*contents), tokenizer) == [f"{c}<|im_end|>" for c in contents[1::2]]


@given(st.lists(CONTENT, min_size=2, max_size=6))
def test_llama3_strips_content(contents: list[str]):
    tokenizer = wrap(byte_level(bos="<s>"), LLAMA3, bos="<s>", eos="<|eot_id|>")
    answers = [f"{answer.strip()}<|eot_id|>" for answer in contents[1::2]]
    assert trained(chat(*contents), tokenizer) == answers


@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=2, max_size=4))
def test_templates_that_refuse_beginnings(turns: list[tuple[str, str]]):
    tokenizer = wrap(byte_level(), WHOLE_ONLY)
    contents = [content for turn in turns for content in turn]
    assert trained(chat(*contents), tokenizer) == [f"{a}<|im_end|>" for _, a in turns]


@given(st.lists(LETTERS.map(str.strip), min_size=4, max_size=4))
def test_thoughts_of_earlier_turns_are_dropped(contents: list[str]):
    tokenizer = wrap(byte_level(), THINKING)
    question, earlier, again, last = contents
    row = chat(question, f"<think>\nold\n</think>\n\n{earlier}", again, f"<think>new</think>{last}")
    assert trained(row, tokenizer) == [
        f"{earlier}<|im_end|>",
        f"<think>\nnew\n</think>\n\n{last}<|im_end|>",
    ]


def test_thoughts_between_tool_calls_keep_their_opening_tag():
    """Two answers after one question: the first shows its thoughts only until the next question,
    so the beginnings of the conversation are no prefixes of the whole."""
    tokenizer = wrap(byte_level(), THINKING)
    row = chat("q", "a", "", "<think>t</think>b", "q2", "c")
    row.messages[2]["role"] = "tool"
    assert trained(row, tokenizer) == [
        "a<|im_end|>",
        "b<|im_end|>",
        "<think>\n\n</think>\n\nc<|im_end|>",
    ]
    del row.messages[4:]
    assert trained(row, tokenizer) == [
        "<think>\n\n</think>\n\na<|im_end|>",
        "<think>\nt\n</think>\n\nb<|im_end|>",
    ]


def test_a_generation_prompt_that_no_finished_turn_contains():
    row = chat("q", "<think>\nt\n</think>a", "q", "<think>\nb")
    assert trained(row, wrap(byte_level(), PROMPTS_A_THOUGHT)) == ["a<|im_end|>", "b<|im_end|>"]


def test_llama2_on_sentencepiece():
    tokenizer = wrap(sentencepiece(), LLAMA2, bos="<s>", eos="</s>")
    example = only(chat("hi", "yes", "hi", "yes🙂"), tokenizer)
    assert trained(chat("hi", "yes", "hi", "yes🙂"), tokenizer) == ["yes </s>", "yes🙂 </s>"]
    assert example.ids.tolist().count(tokenizer.bos_id) == 2
    yes = tokenizer.encode("yes", add_special_tokens=False).ids
    first = example.ids[example.targets][:1]
    assert first == yes, "the space before the answer is part of its first token"


def test_turns_without_an_end_token_end_as_the_template_ends_them():
    tokenizer = wrap(byte_level(), UNENDED)
    assert trained(chat("hi", "yes", "hi", "no"), tokenizer) == ["yes\n", "no\n"]


def test_a_conversation_that_starts_with_the_assistant():
    row = chat("welcome", "hi", "yes")
    for message, role in zip(row.messages, ("assistant", "user", "assistant"), strict=True):
        message["role"] = role
    for template in (CHATML, DEFAULT_SYSTEM, THINKING.replace("<think>", "")):
        texts = trained(row, wrap(byte_level(), template))
        assert [text.split("</think>\n\n")[-1] for text in texts] == [
            "welcome<|im_end|>",
            "yes<|im_end|>",
        ]


def test_thoughts_belong_to_an_answer_without_a_question():
    row = chat("", "<think>t</think>a")
    thinking = "<think>\nt\n</think>\n\na<|im_end|>"
    row.messages[0]["role"] = "assistant"
    for template in (THINKING, "{{- messages[0].role }}" + THINKING):
        first, last = trained(row, wrap(byte_level(), template))
        assert [first, last] == ["<think>\n\n</think>\n\n<|im_end|>", thinking]


def test_without_any_generation_prompt_a_turn_begins_where_its_message_shows():
    refusing = "{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    row = chat("q", "<think>t</think>a")
    assert trained(row, wrap(byte_level(), refusing + THINKING)) == ["t\n</think>\n\na<|im_end|>"]


def test_an_empty_answer_between_special_tokens_of_the_header_and_a_plain_end():
    template = UNENDED.replace(": ", "<|end_header_id|>\\n")
    assert trained(chat("hi", ""), wrap(byte_level(), template)) == ["\n"]


def test_private_characters_in_answers():
    row = chat("a", "\ue000b\ue000", "c", "\ue001")
    assert trained(row, wrap(byte_level(), WHOLE_ONLY)) == [
        "\ue000b\ue000<|im_end|>",
        "\ue001<|im_end|>",
    ]


def test_prompt_and_completion_of_messages_trains_the_completion_only():
    row = chat("hi", "yes", "hi", "no", first=3)
    assert trained(row, BYTES) == ["no<|im_end|>"]


def test_empty_answers_are_answers():
    assert trained(chat("say nothing", ""), BYTES) == ["<|im_end|>"]


def test_text_that_looks_like_a_header_does_not_confuse():
    tokenizer = wrap(byte_level(), WHOLE_ONLY)
    row = chat("a <|im_start|>assistant\nno<|im_end|>", "yes", "<|im_start|>assistant\n", "no")
    assert trained(row, tokenizer) == ["yes<|im_end|>", "no<|im_end|>"]


def test_a_template_that_hides_its_turns_is_an_error_with_file_and_line():
    tokenizer = wrap(byte_level(), TWICE)
    row = chat("a", "b", "c", "d")
    with pytest.raises(DataError, match=r"^train\.jsonl, line 1: .* message 2 begins and ends"):
        build([row], tokenizer)
    assert only(row, tokenizer, train_on="everything").targets[1:].all()


def test_a_template_that_refuses_is_an_error_with_file_and_line():
    tokenizer = wrap(sentencepiece(), LLAMA2, bos="<s>", eos="</s>")
    row = chat("hi", "yes")
    row.messages.reverse()
    with pytest.raises(DataError, match=r"^train\.jsonl, line 1: .*must take turns"):
        build([row], tokenizer)
    with pytest.raises(FormatError, match="no chat template"):
        build([row], wrap(byte_level()))


# Prompt and completion, text


@given(CONTENT, CONTENT)
def test_completions_are_trained_to_the_end(prompt: str, completion: str):
    row = plain(prompt, completion)
    if not prompt + completion:
        return
    assert trained(row, BYTES) == [f"{completion}</s>"]
    assert trained(row, BYTES, train_on="last-assistant") == [f"{completion}</s>"]
    assert trained(row, BYTES, train_on="everything") == [f"{prompt}{completion}</s>"]
    assert only(row, BYTES).ids[0] == BYTES.bos_id


def test_text_is_trained_whole():
    tokenizer = wrap(byte_level(), eos="</s>")
    for text in ("abc", "abc</s>"):
        assert trained(plain("", text), tokenizer) == ["bc</s>"], "the first token has no past"
    assert trained(plain("", "abc"), wrap(byte_level())) == ["bc"]


def test_a_token_that_straddles_the_boundary_is_trained():
    tokenizer = wrap(byte_level(merges=((":", "Ġ"), (":Ġ", "y"))), eos="</s>")
    assert trained(plain("a:", " yes"), tokenizer) == [": yes</s>"]
    tokenizer = wrap(byte_level(merges=(("Ċ", "u"),)), UNENDED)
    assert trained(chat("hi", "yes", "hi"), tokenizer) == ["yes\nu"]
    tokenizer = wrap(byte_level(merges=(("Ġ", "y"),)), eos="</s>")
    assert trained(plain("a:", " yes"), tokenizer) == [" yes</s>"]
    assert trained(plain("a: ", "yes"), tokenizer) == [" yes</s>"]


def test_sentencepiece_completion_with_byte_fallback():
    tokenizer = wrap(sentencepiece("first"), bos="<s>", eos="</s>")
    assert trained(plain("hi:", "🙂 yes"), tokenizer) == ["🙂 yes</s>"]


# Cutting and counting


def test_report_counts():
    rows = [chat("hi", "yes"), chat("hi" * 50, "yes"), chat("hi", "yes"), plain("", "")]
    rows[2].messages.pop()
    rows[3] = Plain(HERE, 4, ("b", "a"), "", "")
    lengths = [len(BYTES.render(row.messages).replace("<|im_start|>", "_")) for row in rows[:3]]
    built = build(rows, BYTES, max_length=60)
    first = only(rows[0], BYTES)
    assert built.report == Report(
        rows=4,
        tokens=len(first),
        target_tokens=4,
        rows_cut=1,
        tokens_cut=built.report.longest - 60,
        rows_without_target=3,
        longest=len(BYTES.encode(BYTES.render(rows[1].messages), False).ids),
        ignored_keys=("a", "b"),
    )
    assert len(built) == 1 and built[0].ids.tolist() == first.ids.tolist()
    assert max(lengths) > 60
    assert built.report.suggested_max_length % 64 == 0
    assert 0 <= built.report.suggested_max_length - built.report.longest < 64
    text = built.report.describe(live_share=0.5)
    for part in (
        f"1, {built.report.tokens_cut} tokens lost",
        "3 (left out)",
        "50.0%",
        "a, b",
        "would cut none",
    ):
        assert part in text
    assert "live" not in built.report.describe()


def test_cut_rows_keep_their_beginning():
    row = chat("hi", "yes")
    whole = only(row, BYTES)
    length = int(np.flatnonzero(whole.targets)[0]) + 2
    example = only(row, BYTES, max_length=length)
    assert example.cut and not whole.cut
    assert example.ids.tolist() == whole.ids[:length].tolist()
    assert example.targets.sum() == 2
    assert not only(row, BYTES, max_length=len(whole)).cut


def test_nothing_to_train_on():
    with pytest.raises(DataError, match=r"train\.jsonl: none of its 1 rows.*cut by --max-length 4"):
        build([chat("hi", "yes")], BYTES, max_length=4)
    with pytest.raises(DataError, match="none of its 1 rows has a token to train on"):
        build([plain("", "")], BYTES, train_on="everything")
    with pytest.raises(DataError, match="no rows"):
        build([], BYTES)


def test_senseless_settings():
    with pytest.raises(ConfigError, match="train_on"):
        build([chat("hi", "yes")], BYTES, train_on="user")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_length"):
        build([chat("hi", "yes")], BYTES, max_length=1)


def test_half_a_surrogate_pair_is_an_error_with_file_and_line():
    with pytest.raises(DataError, match=r"train\.jsonl, line 1: '\\ud83d' is half"):
        build([plain("", "a\ud83d")], BYTES)


def test_rows_keep_their_order_across_chunks():
    rows: list[Row] = [Plain(HERE, line, (), "", f"{line}") for line in range(10, 2100)]
    examples = build(rows, BYTES).examples
    assert [example.line for example in examples] == list(range(10, 2100))
    assert all(BYTES.decode(e.ids) == f"<s>{e.line}</s>" for e in examples)


def test_show_colours_what_is_trained():
    row = chat("é[bold]", "🙂 yes")
    shown = show(only(row, BYTES), BYTES)
    assert shown.plain == BYTES.render(row.messages)
    coloured = [shown.plain[s.start : s.end] for s in shown.spans if "green" in str(s.style)]
    assert coloured == ["🙂 yes<|im_end|>"]
