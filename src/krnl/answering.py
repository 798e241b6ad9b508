"""`krnl generate`: from options to printed answers."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from krnl.data.rows import Chat, read_rows
from krnl.data.template import Message
from krnl.data.tokenizer import Tokenizer
from krnl.devices import activation_type, open_backend
from krnl.errors import ConfigError, DataError
from krnl.formats.files import user_path
from krnl.generator import Answer, Request, Sampling, answer_all, open_generator
from krnl.model import Model
from krnl.options import GenerateOptions


def answer(options: GenerateOptions) -> None:
    """Prints answers to standard output: a single one as it grows, several in the order of their
    prompts."""
    if (options.prompt is None) == (options.messages is None):
        raise ConfigError("Give either a prompt or --messages FILE.jsonl.")
    if options.answer_last and options.messages is None:
        raise ConfigError("answer_last concerns the conversations of --messages.")
    if options.raw and options.prompt is None:
        raise ConfigError("raw concerns a prompt, and --messages are conversations.")
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    for name in ("top_p", "seed"):
        if options.temperature == 0 and getattr(sampling, name) != getattr(Sampling(), name):
            raise ConfigError(f"{name} concerns sampling; give a temperature above 0 too.")
    model = Model.open(options.model)
    adapter = None if options.adapter is None else model.read_adapter(user_path(options.adapter))
    if options.prompt is not None:
        prompts = [prompt_ids(model.tokenizer, options.prompt, options.raw)]
    else:
        assert options.messages is not None
        prompts = conversation_ids(model, user_path(options.messages), options.answer_last)
    request = Request(prompts, options.max_tokens, sampling)
    backend = open_backend(options.device)
    activation = activation_type(backend, options.precision)
    generator = open_generator(model, adapter, backend, activation, request)
    live = len(prompts) == 1 and not options.json
    finished: dict[int, Answer] = {}
    printed = 0
    for number, piece, whole in answer_all(generator, model, request):
        if live:
            print(piece, end="", flush=True)
        if whole is not None:
            finished[number] = whole
        while not live and printed in finished:
            _print(finished.pop(printed), options.json)
            printed += 1
    if live:
        print()


def prompt_ids(tokenizer: Tokenizer, prompt: str, raw: bool = False) -> np.ndarray:
    """Token ids of a prompt: as a user's turn if the tokenizer has a chat template, unless it is
    `raw`."""
    if tokenizer.has_template and not raw:
        return chat_ids(tokenizer, [{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt).ids


def conversation_ids(model: Model, path: Path, answer_last: bool) -> list[np.ndarray]:
    """Token ids of every conversation in a file, up to where the assistant answers. DataError names
    the line of one that does not end with somebody else's turn, or leaves no room for an answer."""
    prompts, limit = [], model.config.max_positions - 1
    for row in read_rows(path):
        if not isinstance(row, Chat):
            raise DataError(f"{row.where} is not a conversation: it needs a 'messages' list.")
        messages = list(row.messages)
        if answer_last:
            if messages[-1]["role"] != "assistant":
                raise DataError(
                    f"{row.where} does not end with an assistant's turn, which --answer-last "
                    "leaves out."
                )
            messages.pop()
        if not messages or messages[-1]["role"] == "assistant":
            raise DataError(
                f"{row.where} leaves nothing to answer: its last turn is the assistant's. Give "
                "--answer-last to answer it anew."
            )
        ids = chat_ids(model.tokenizer, messages, row.tools)
        if len(ids) > limit:
            raise DataError(
                f"{row.where} has {len(ids):,} tokens; with room for an answer the limit of this "
                f"model is {limit:,}."
            )
        prompts.append(ids)
    return prompts


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
) -> np.ndarray:
    """Token ids of a conversation, up to where the assistant answers."""
    text = tokenizer.render(list(messages), add_generation_prompt=True, tools=tools)
    return tokenizer.encode(text, add_special_tokens=False).ids


def _print(whole: Answer, as_json: bool) -> None:
    if as_json:
        line = {"answer": whole.text, "tokens": whole.tokens, "stopped": whole.stopped}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    else:
        print(whole.text, flush=True)
    sys.stdout.flush()
