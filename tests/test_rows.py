"""Rows: what counts as one, and a sentence with file and line for everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krnl.data.rows import Chat, Plain, read_rows, split
from krnl.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yes"}


def lines(folder: Path, *rows: Any, name: str = "train.jsonl") -> Path:
    path = folder / name
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(texts))
    return path


def test_the_three_kinds(tmp_path: Path):
    path = lines(
        tmp_path,
        {"messages": [USER, ASSISTANT], "tools": [{"name": "t"}], "id": 7},
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        {"prompt": "a", "completion": "b"},
        {"text": "c", "source": "web"},
    )
    chat, continued, completion, text = read_rows(path)
    assert isinstance(chat, Chat) and isinstance(continued, Chat)
    assert (chat.messages, chat.first, chat.tools) == ([USER, ASSISTANT], 0, [{"name": "t"}])
    assert chat.ignored == ("id",)
    assert (len(continued.messages), continued.first, continued.tools) == (4, 3, None)
    assert completion == Plain(path, 3, (), "a", "b")
    assert text == Plain(path, 4, ("source",), "", "c")
    assert text.where == f"{path}, line 4"


def test_bom_crlf_blank_lines_and_unicode_line_separators(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    separator = '{"text": "a\u2028b"}'.encode()
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n  \n' + separator + b"\r\n")
    assert [(row.line, row.completion) for row in read_rows(path)] == [(1, "x"), (4, "a\u2028b")]


def test_json_lists_know_their_lines(tmp_path: Path):
    path = tmp_path / "train.json"
    path.write_text('[\n {"text": "a[\\"]"},\n\n {"text":\n "b"}, {"text": "c"}\n]\n')
    assert [(row.line, row.completion) for row in read_rows(path)] == [
        (2, 'a["]'),
        (4, "b"),
        (5, "c"),
    ]
    path.write_text('\ufeff{"n": {"rows": [1]}, "data" :\n[{"text": "a"}\n,{"text": 1}]}', "utf-8")
    with pytest.raises(DataError, match=r"train\.json, line 3: `text` must be a string"):
        read_rows(path)


@given(st.lists(st.text(), min_size=1), st.sampled_from(["list", "first", "last"]))
def test_json_lists_know_their_lines_wherever_they_are(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], place: str
):
    rows = [{"text": text} for text in texts]
    other = {"about": {"rows": ["]", {"}": [1, []]}]}, "version": 1}
    document = {"list": rows, "first": {"rows": rows, **other}, "last": {**other, "rows": rows}}
    text = json.dumps(document[place], indent=1, ensure_ascii=False)
    path = tmp_path_factory.mktemp("json") / "train.json"
    path.write_bytes(text.encode())
    first = 1 + text[: text.index('{\n  "text": ' if place == "list" else '{\n   "text": ')].count(
        "\n"
    )
    expected = [(first + 3 * i, one) for i, one in enumerate(texts)]
    assert [(row.line, row.completion) for row in read_rows(path)] == expected


def test_content_parts_are_joined(tmp_path: Path):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    (row,) = read_rows(lines(tmp_path, {"messages": [{"role": "user", "content": parts}]}))
    assert row.messages == [USER]


def test_tool_calls_get_content_and_arguments_as_objects(tmp_path: Path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    turns = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    (row,) = read_rows(lines(tmp_path, {"messages": turns}))
    first, second, result = row.messages
    assert first["content"] == second["content"] == ""
    assert first["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "f", "arguments": {"x": 1}},
    }
    assert second["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}]
    assert result == turns[2]


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ASSISTANT, **changes}]}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "Extra data at column 15"),
        (b'{"text": "\xff"}', "byte 0xff is not UTF-8"),
        (b'{"text": "a", "text": "b"}', "'text' appears twice"),
        (b'{"messages": [{"role": "user", "role": "tool"}]}', "'role' appears twice"),
        (b'{"text": ' + b"[" * 100_000, "cannot be read"),
        (["text"], "must be a JSON object, not a list"),
        (None, "must be a JSON object, not null"),
        ({}, "this one has nothing"),
        ({"prompt": "a", "conversations": []}, "has 'prompt', 'conversations'"),
        ({"text": "a", "messages": [USER]}, "exactly one of"),
        ({"text": 3}, "`text` must be a string, not a number"),
        ({"prompt": "a", "completion": None}, "`completion` must be a string.*not null"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "both lists of messages"),
        ({"prompt": [], "completion": [ASSISTANT]}, "`prompt` must be a list of at least one"),
        ({"messages": "hi"}, "`messages` must be a list of at least one message, not a string"),
        ({"messages": []}, "not an empty list"),
        ({"messages": [USER, "hi"]}, "message 2 must be an object with `role`"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 1 must be an object with"),
        (message(role="bot"), "message 2 has the role 'bot'; the roles are system, user"),
        (message(role=["user"]), "has the role"),
        (message(content=3), "`content` must be a string or a list of text parts, not a number"),
        (message(content=None), "`content` must be .* not null"),
        (message(content=True), "not true or false"),
        (message(content=[{"type": "image"}]), "images and other parts cannot be trained"),
        (message(tool_calls="f()"), "`tool_calls` must be a list"),
        (message(tool_calls=[{"arguments": "{"}]), "arguments of a tool call are not JSON"),
        ({"messages": [USER], "tools": {}}, "`tools` must be a list of objects, not an object"),
    ],
)
def test_bad_rows_are_one_sentence_with_file_and_line(tmp_path: Path, row: Any, sentence: str):
    path = lines(tmp_path, {"text": "good"}, b"", row, {"text": "good"})
    with pytest.raises(DataError, match=sentence) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}, line 3")
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path):
    def refused(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_rows(tmp_path / name)
        return str(caught.value)

    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        assert refused("a.jsonl", content) == f"{tmp_path / 'a.jsonl'} is empty: it has no rows."
        assert refused("a.json", content) == f"{tmp_path / 'a.json'} is empty: it has no rows."
    assert "is empty" in refused("a.json", b"[]")
    assert "line 2" in refused("a.json", b'[{"text": "a"},\n{"text": }]')
    assert "line 2" in refused("a.json", b'[{"text": "a"},\n{"text": "\xe9"}]')
    assert "name it .jsonl" in refused("a.json", b'{"text": "a"}\n{"text": "b"}\n')
    assert "name it .json." in refused("a.jsonl", b'[\n{"text": "a"}\n]')
    assert "exactly one list" in refused("a.json", b'{"text": "a"}')
    assert "exactly one list" in refused("a.json", b'{"a": [], "b": []}')
    assert "expected a list" in refused("a.json", b"3")
    assert ".jsonl or .json" in refused("a.csv", b"text\na")
    assert "0xff" in refused("a.jsonl", '{"text": "a"}'.encode("utf-16"))
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "missing.jsonl")


def test_split(tmp_path: Path):
    with pytest.raises(DataError, match="does not exist"):
        split(tmp_path / "missing")
    with pytest.raises(DataError, match=r"neither train\.jsonl nor train\.json"):
        split(tmp_path)
    train = lines(tmp_path, {"text": "a"})
    assert split(train) == (train, None)
    assert split(tmp_path) == (train, None)
    valid = lines(tmp_path, {"text": "a"}, name="validation.json")
    assert split(tmp_path) == (train, valid)
    lines(tmp_path, {"text": "a"}, name="valid.jsonl")
    with pytest.raises(DataError, match=r"valid\.jsonl and validation\.json: keep one"):
        split(tmp_path)
