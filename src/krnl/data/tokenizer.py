"""A checkpoint's tokenizer: text to ids and back, and conversations to text.

Three things decide: tokenizer.json (vocabulary and rules, read by the `tokenizers` library),
tokenizer_config.json (which strings begin and end a text) and the chat template, looked for in
chat_template.jinja, chat_template.json and tokenizer_config.json, in this order.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.processors import TemplateProcessing

from krnl.data.template import ChatTemplate, Message
from krnl.errors import DataError, FormatError

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, eq=False)
class Encoding:
    """One tokenised text.

    ids: int32 [n]. offsets: int32 [n, 2], the characters `text[start:end]` each token stands for.
    Where one character spans several tokens they all carry that character; tokens added around the
    text are empty, at its start or end.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """Encodes, decodes and renders conversations as the checkpoint's authors do.

    bos_id, eos_id: ids of the tokens that begin and end a text, or None.
    special_tokens: the strings of all special tokens, longest first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        names: Mapping[str, str],
        templates: Mapping[str, str],
        declared_ends: Iterable[int],
        where: str,
    ) -> None:
        """names: bos_token, eos_token, ... -> string. templates: name -> Jinja source.

        declared_ends: ids that the model's configuration stops on. where: the folder, for messages.
        """
        self.where = where
        self._names = dict(names)
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._before, self._after = _added_around(backend)
        # Besides adding tokens, post-processors trim white space off the offsets of others, but
        # boundaries need every character accounted for.
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self._declared_ends = frozenset(declared_ends)
        special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        special.update(names[key] for key in ("bos_token", "eos_token") if key in names)
        self.special_tokens = tuple(sorted(special, key=lambda token: (-len(token), token)))
        self._template = ChatTemplate(templates, names, where)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in `folder`.

        Raises FormatError if tokenizer.json is missing or damaged, or if another file is not what
        it should be.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = ""
            if (folder / "tokenizer.model").is_file():
                hint = " To convert its tokenizer.model, load and save it once with transformers."
            raise FormatError(
                f"{folder} has no tokenizer.json, which KRNL needs to turn text into tokens.{hint}"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise FormatError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_object(folder / "tokenizer_config.json")
        declared = config, _read_object(folder / "special_tokens_map.json")
        model = _read_object(folder / "config.json")
        generation = _read_object(folder / "generation_config.json")

        names = {}
        for key in _TOKEN_NAMES:
            # A key that is present and null says "none" (Qwen: no BOS), whatever config.json has.
            found = next((source[key] for source in declared if key in source), _absent)
            if found is _absent and key in ("bos_token", "eos_token"):
                ids = _id_list(model.get(f"{key}_id"), folder / "config.json")
                found = backend.id_to_token(ids[0]) if ids else None
            content = found.get("content") if isinstance(found, dict) else found
            if isinstance(content, str):
                names[key] = content
        stop_source, stop_path = model, folder / "config.json"
        if "eos_token_id" in generation:
            stop_source, stop_path = generation, folder / "generation_config.json"
        ends = _id_list(stop_source.get("eos_token_id"), stop_path)
        return cls(backend, names, _find_templates(folder, config), ends, str(folder))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer can produce."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids on which generation stops: those declared by generation_config.json (or else
        config.json), `eos_id`, and the token that the chat template ends an answer with.

        The last matters for base models, whose configuration often names another one.
        """
        ends = set(self._declared_ends)
        if self.eos_id is not None:
            ends.add(self.eos_id)
        if self.has_template:
            mark = "\ue000"
            try:
                text = self.render(
                    [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
                )
            except DataError:
                return frozenset(ends)
            after = text.rfind(mark) + 1
            token = text[after : self.turn_end(text, after)].strip() if after else ""
            if (end := self._backend.token_to_id(token)) is not None:
                ends.add(end)
        return frozenset(ends)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._template)

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Tokenise `text`; see `encode_batch`."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Tokenise each text on its own, in parallel.

        With `add_special_tokens` the result is what `surround` makes of it. Rendered conversations
        are encoded without: a template writes every token it wants, and programs that serve the
        model add none either. DataError for half a surrogate pair, which is no text.
        """
        for text in texts:
            if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise DataError("The text holds half a surrogate pair, which no encoding has.")
        encodings = [
            Encoding(
                np.array(found.ids, np.int32), np.array(found.offsets, np.int32).reshape(-1, 2)
            )
            for found in self._backend.encode_batch(list(texts), add_special_tokens=False)
        ]
        return [self.surround(found) for found in encodings] if add_special_tokens else encodings

    def surround(self, encoding: Encoding, end: bool = False) -> Encoding:
        """Add the tokens that the tokenizer puts around a text (often BOS before it), except on a
        side where they already are: BOS is never doubled. `end`: also make EOS the last token."""
        ids, offsets = encoding.ids, encoding.offsets
        before, after = self._before, self._after
        if before.size and not np.array_equal(ids[: before.size], before):
            ids = np.concatenate([before, ids])
            offsets = np.concatenate([np.zeros((before.size, 2), np.int32), offsets])
        if np.array_equal(ids[ids.size - after.size :], after):
            after = after[:0]
        if end and self.eos_id is not None and [*ids, *after][-1:] != [self.eos_id]:
            after = np.append(after, np.int32(self.eos_id))
        stop = offsets[:, 1].max(initial=0)
        offsets = np.concatenate([offsets, np.full((after.size, 2), stop, np.int32)])
        return Encoding(np.concatenate([ids, after]), offsets)

    def decode(
        self, ids: Sequence[int] | NDArray[np.int32], skip_special_tokens: bool = False
    ) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """A decoder for tokens that arrive one by one."""
        return TextStream(self, skip_special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as one text; see `ChatTemplate.render`."""
        return self._template.render(messages, add_generation_prompt, tools)

    def turn_end(self, text: str, at: int) -> int:
        """Where the special token after position `at` ends, white space before it allowed, or `at`
        if there is none."""
        found = self._next_special.match(text, at)
        return found.end() if found else at

    @cached_property
    def _next_special(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.special_tokens)) or '(?!)'})")

    def _id(self, name: str) -> int | None:
        token = self._names.get(name)
        if token is None:
            return None
        found = self._backend.token_to_id(token)
        if found is None:
            raise FormatError(
                f"The tokenizer in {self.where} names {token!r} as its {name}, but tokenizer.json "
                "has no such token."
            )
        return found


class TextStream:
    """Turns tokens into text as they arrive, holding back a character until it is complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        # Tokens before `_shown` have been returned. Those from `_context` on are decoded again with
        # the new ones, since sentencepiece decoders drop the leading space of the first token.
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Take one token; return the text that it completes, perhaps empty."""
        self._ids.append(int(token))
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back: at most an incomplete character, as U+FFFD."""
        text = self._pending()
        self._context = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._shown], self._skip)
        return self._tokenizer.decode(self._ids[self._context :], self._skip)[len(shown) :]


_absent = object()


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja source, from the first place that has one."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        paths = {"default": alone}
        paths |= {
            path.stem: path
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
        return {name: _read_text(path) for name, path in paths.items()}
    path = folder / "chat_template.json"
    value = _read_object(path).get("chat_template")
    if value is None:
        path = folder / "tokenizer_config.json"
        value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise FormatError(
            f"{path}: `chat_template` must be a string, or a list of objects with `name` and "
            "`template`."
        )
    if "default" not in named:
        raise FormatError(
            f"{path}: none of its chat templates is called 'default' "
            f"(found: {', '.join(sorted(named))})."
        )
    return named


def _added_around(backend: tokenizers.Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids that the post-processor puts before and after every text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(full) - len(bare) + 1)
    start = next((i for i in starts if full[i : i + len(bare)] == bare), 0)
    return np.array(full[:start], np.int32), np.array(full[start + len(bare) :], np.int32)


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} must hold one JSON object.")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not valid UTF-8 (byte {error.start}).") from error


def _id_list(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise FormatError(
            f"{path}: token ids must be whole numbers or lists of them, not {value!r}."
        )
    return ids
