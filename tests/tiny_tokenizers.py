"""Small tokenizers with the habits of real ones, and chat templates in the manner of real ones."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from krnl.data.tokenizer import Tokenizer

CHATML = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

DEFAULT_SYSTEM = (
    r"""
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}
{%- endif %}
"""
    + CHATML
)

LLAMA3 = r"""
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA2 = r"""
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + m.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

THINKING = r"""
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.question %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')
                if '</think>' in m.content else '' %}
            {{- '<think>\n' + thought + '\n</think>\n\n' + answer }}
        {%- else %}
            {{- answer }}
        {%- endif %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

PROMPTS_A_THOUGHT = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}
"""

WHOLE_ONLY = (
    "{% if messages[-1]['role'] != 'assistant' or messages | length < 4 %}"
    "{{ raise_exception('finish the conversation') }}{% endif %}" + CHATML
)

UNENDED = r"""
{%- for m in messages %}
    {{- m.role + ': ' + m.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}
"""

TWICE = WHOLE_ONLY + "{{ messages[1]['content'] }}"

SPECIAL = (
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)


def byte_level(merges: tuple[tuple[str, str], ...] = (), bos: str | None = None) -> Backend:
    """Every byte a token, plus `merges`; trims offsets as GPT-2's does; adds `bos` if given."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)]
    if bos:
        steps.append(_adds(bos, backend))
    backend.post_processor = processors.Sequence(steps)
    return backend


def sentencepiece(prepend: str = "normalizer") -> Backend:
    """A BPE with byte fallback that marks spaces and puts one before the text, as Llama 2's."""
    vocabulary = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for piece in "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:[]/":
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "y"), ("e", "s"), ("▁y", "es"), ("h", "i"), ("▁", "hi")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prepend == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.post_processor = _adds("<s>", backend)
    return backend


def _adds(bos: str, backend: Backend) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )


def wrap(backend: Backend, template: str = "", bos: str | None = None, eos: str = "") -> Tokenizer:
    """A KRNL tokenizer without files."""
    names = {name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token}
    templates = {"default": template} if template else {}
    return Tokenizer(backend, names, templates, declared_ends=(), where="memory")


def save(folder: Path, backend: Backend, **files: Any) -> Path:
    """Write a checkpoint folder; `tokenizer_config={...}` becomes tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
