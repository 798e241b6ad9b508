"""Tokenizer: ids, offsets, BOS and EOS, chat templates, streaming."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from krnl.data.tokenizer import Tokenizer
from krnl.errors import DataError, FormatError
from tiny_tokenizers import CHATML, LLAMA2, LLAMA3, byte_level, save, sentencepiece, wrap

CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
BYTES = wrap(byte_level())
PIECES = wrap(sentencepiece(), bos="<s>", eos="</s>")


def test_bos_of_the_post_processor_is_added_once():
    tokenizer = wrap(byte_level(bos="<s>"), bos="<s>", eos="</s>")
    for text in ("hi", "<s>hi"):
        assert tokenizer.encode(text).ids.tolist().count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in tokenizer.encode("hi", add_special_tokens=False).ids
    assert tokenizer.encode("").ids.tolist() == [tokenizer.bos_id]


def test_llama3_has_bos_from_template_and_post_processor_but_once():
    tokenizer = wrap(byte_level(bos="<s>"), LLAMA3, bos="<s>", eos="<|eot_id|>")
    text = tokenizer.render(CONVERSATION)
    assert text.startswith("<s><|start_header_id|>user")
    for add in (True, False):
        assert tokenizer.encode(text, add).ids.tolist().count(tokenizer.bos_id) == 1


def test_end_is_added_once():
    tokenizer = wrap(byte_level(bos="<s>"), bos="<s>", eos="</s>")
    for text in ("hi", "hi</s>"):
        ended = tokenizer.surround(tokenizer.encode(text), end=True)
        assert tokenizer.decode(ended.ids) == "<s>hi</s>"
        assert len(ended.offsets) == len(ended.ids)


def test_tokens_after_the_text_are_added_once():
    backend = byte_level()
    backend.post_processor = TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
    )
    tokenizer = wrap(backend, eos="</s>")
    for text in ("hi", "hi</s>"):
        for end in (True, False):
            found = tokenizer.surround(tokenizer.encode(text), end)
            assert tokenizer.decode(found.ids) == "hi</s>"


def test_a_null_token_is_none_whatever_the_model_says(tmp_path: Path):
    settings = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    folder = save(tmp_path, byte_level(), tokenizer_config=settings, config={"bos_token_id": 3})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id is None
    assert tokenizer.decode([tokenizer.eos_id]) == "<|im_end|>"


def test_undeclared_tokens_come_from_the_other_files(tmp_path: Path):
    backend = byte_level()
    bos = backend.token_to_id("<s>")
    folder = save(
        tmp_path,
        backend,
        special_tokens_map={"eos_token": "</s>"},
        config={"bos_token_id": bos, "eos_token_id": [0, 1]},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == bos
    assert tokenizer.decode([tokenizer.eos_id]) == "</s>"
    assert tokenizer.end_ids == {0, 1, tokenizer.eos_id}


def test_end_ids_prefer_generation_config_and_include_the_end_of_a_turn(tmp_path: Path):
    backend = byte_level()
    eos, turn = backend.token_to_id("<|endoftext|>"), backend.token_to_id("<|im_end|>")
    folder = save(
        tmp_path,
        backend,
        tokenizer_config={"eos_token": "<|endoftext|>", "chat_template": CHATML},
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [7]},
    )
    assert Tokenizer.load(folder).end_ids == {7, eos, turn}


@pytest.mark.parametrize("place", ["string", "list", "jinja", "json"])
def test_template_is_found_wherever_it_is(tmp_path: Path, place: str):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": CHATML}]
    value = {"string": CHATML, "list": named, "jinja": "wrong", "json": "wrong"}[place]
    files = {"tokenizer_config": {"chat_template": value, "eos_token": "<|im_end|>"}}
    if place == "json":
        files["chat_template"] = {"chat_template": CHATML}
    save(tmp_path, byte_level(), **files)
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render(CONVERSATION) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    if place in ("list", "jinja"):
        assert tokenizer.render(CONVERSATION, tools=[{"name": "t"}]) == "T"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("a{% generation %}{{ messages[1].content }}{% endgeneration %}b", "ayesb"),
        ("{{ {'k': 'é<'} | tojson }}", '{"k": "é<"}'),
        ("{{ {'k': 1} | tojson(indent=1) }}", '{\n "k": 1\n}'),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_templates_get_what_they_expect(template: str, expected: str):
    assert wrap(byte_level(), template, "<s>", "</s>").render(CONVERSATION) == expected


def test_clock_stands_still_within_a_run():
    text = wrap(byte_level(), "{{ strftime_now('%Y %f') }}")
    assert text.render(CONVERSATION) == text.render(CONVERSATION)
    assert int(text.render(CONVERSATION)[:4]) >= datetime.date.today().year - 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such turn') }}",
        "{{ messages[7].content + 'x' }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_is_a_data_error(template: str):
    with pytest.raises(DataError, match="chat template refuses"):
        wrap(byte_level(), template).render(CONVERSATION)


def test_end_ids_survive_a_template_that_refuses():
    tokenizer = wrap(byte_level(), "{{ raise_exception('never') }}", eos="</s>")
    assert tokenizer.end_ids == {tokenizer.eos_id}


def test_end_ids_of_a_template_without_answers():
    assert wrap(byte_level(), "<|im_start|>{{ messages[0].content }}").end_ids == set()


def test_llama2_refusal_says_why():
    tokenizer = wrap(sentencepiece(), LLAMA2, "<s>", "</s>")
    with pytest.raises(DataError, match="must take turns"):
        tokenizer.render(CONVERSATION[1:])


def test_damaged_checkpoints_are_format_errors(tmp_path: Path):
    def load(**files: object) -> Tokenizer:
        return Tokenizer.load(save(tmp_path, byte_level(), **files))

    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path / "missing")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").touch()
    with pytest.raises(FormatError, match="with transformers"):
        Tokenizer.load(tmp_path / "old")
    with pytest.raises(FormatError, match="has no such token"):
        load(tokenizer_config={"eos_token": "<eos>"})
    with pytest.raises(FormatError, match="not valid Jinja"):
        load(tokenizer_config={"chat_template": "{% for %}"})
    with pytest.raises(FormatError, match="default"):
        load(tokenizer_config={"chat_template": [{"name": "rag", "template": ""}]})
    with pytest.raises(FormatError, match="must be a string"):
        load(tokenizer_config={"chat_template": 3})
    with pytest.raises(FormatError, match="one JSON object"):
        load(tokenizer_config=[])
    with pytest.raises(FormatError, match="whole numbers"):
        load(tokenizer_config={}, config={"eos_token_id": "two"})
    (tmp_path / "config.json").write_text('{\n"a": }')
    with pytest.raises(FormatError, match=r"config\.json, line 2"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


def test_no_template_is_said():
    with pytest.raises(FormatError, match="no chat template"):
        BYTES.render(CONVERSATION)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("hello").ids) == "hello"


@given(st.text())
def test_byte_level_offsets_cover_every_character(text: str):
    found = BYTES.encode(text)
    assert found.ids.dtype == found.offsets.dtype == np.int32
    assert len(found.ids) == len(text.encode())
    spelled = [text[a:b] for a, b in found.offsets]
    assert all(len(piece) == 1 for piece in spelled)
    assert BYTES.decode(found.ids) == text


def test_white_space_is_not_trimmed_off_offsets():
    assert wrap(byte_level(merges=(("Ġ", "a"),))).encode(" a \n").offsets.tolist() == [
        [0, 2],
        [2, 3],
        [3, 4],
    ]


def test_byte_fallback_offsets_are_the_character():
    assert PIECES.encode("hi🙂", add_special_tokens=False).offsets.tolist() == [
        [0, 2],
        *[[2, 3]] * 4,
    ]


def test_offsets_count_characters_before_normalisation():
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    found = wrap(backend).encode("e\u0301x")
    assert found.offsets[-1].tolist() == [2, 3]


@given(st.text())
def test_stream_says_what_decode_says(text: str):
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(text, add_special_tokens=False).ids.tolist()
        stream = tokenizer.stream()
        parts = [stream.push(token) for token in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
        if tokenizer is BYTES and "\ufffd" not in text:
            assert all("\ufffd" not in part for part in parts)


def test_stream_holds_back_half_a_character_and_skips_special_tokens():
    ids = [*BYTES.encode("é").ids.tolist(), *BYTES.encode("<|im_end|>a").ids.tolist()]
    stream = BYTES.stream()
    assert [stream.push(token) for token in ids] == ["", "é", "", "a"]
    half = BYTES.encode("é").ids[:1]
    assert stream.push(half[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_vocab_size_counts_added_tokens(tmp_path: Path):
    tokenizer = Tokenizer.load(save(tmp_path, byte_level()))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert tokenizer.vocab_size == len(stored["model"]["vocab"]) + len(stored["added_tokens"])
