"""`krnl doctor`: what is here, and whether it computes what it should."""

import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from rich.console import Console
from rich.markup import escape

from krnl import __version__
from krnl.backends.base import Backend
from krnl.backends.cpu import ISA_VARIABLE, CpuBackend, available_isas
from krnl.backends.cuda_driver import PACKAGES
from krnl.backends.reference import ReferenceBackend
from krnl.data.packing import random_pass
from krnl.devices import has_cuda, has_metal
from krnl.dtypes import BF16, F32, DType
from krnl.errors import KrnlError
from krnl.formats.files import write_json_atomic
from krnl.formats.peft import AdapterConfig
from krnl.formats.safetensors import write_safetensors
from krnl.model import Model, initial_modules
from krnl.models.config import parse, tensor_shapes
from krnl.training.loss_scale import initial_scale
from krnl.training.session import Session, plan_training

if TYPE_CHECKING:
    from krnl.backends.cuda import CudaBackend
    from krnl.backends.metal import MetalBackend

B = TypeVar("B", bound=Backend)

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "tokenizers",
    "huggingface-hub",
    "jinja2",
    "pyyaml",
    "tyro",
    "rich",
    "matplotlib",
)

# A model small enough for the reference, with every kind of layer in it.
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TOKENS, LIVE = 96, 90  # capacity, and how much of it is used


def examine(console: Console) -> bool:
    """Prints versions, instruction sets and one step on each backend against the reference. Whether
    all passed."""
    console.print(
        f"krnl {__version__}, Python {platform.python_version()}, {platform.platform()}",
        highlight=False,
    )
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} [red]missing[/]")
    console.print(", ".join(found), highlight=False)
    cpu = CpuBackend()
    console.print(
        f"cpu: {cpu.limits.threads} threads, {cpu.limits.memory / 2**30:.1f} GiB, instruction sets "
        f"{', '.join(available_isas())}; uses {cpu.isa}",
        highlight=False,
    )
    metal = _metal(console)
    refusals = metal.refused_libraries() if metal is not None else []
    for refusal in refusals:
        console.print(f"[red]FAIL[/] {escape(refusal)}", highlight=False)
    cuda = _cuda(console)
    passed = (metal is not None or not has_metal()) and not refusals
    passed &= cuda is not None or not has_cuda()
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder))
        exact = one_step(model, ReferenceBackend(), F32)
        for isa in available_isas():
            for activation in (F32, BF16):
                passed &= _check(console, model, exact, _cpu(isa), f"cpu ({isa})", activation)
        gpus: list[Backend] = [gpu for gpu in (metal, cuda) if gpu is not None]
        for gpu in gpus:
            for activation in gpu.limits.activations:
                passed &= _check(console, model, exact, gpu, gpu.name, activation)
    return passed


def _opened(console: Console, name: str, backend: Callable[[], B]) -> B | None:
    """The device, or None; says why it does not open."""
    try:
        return backend()
    except KrnlError as error:
        console.print(f"[red]FAIL[/] {name}: {escape(str(error))}", highlight=False)
        return None


def _metal(console: Console) -> "MetalBackend | None":
    """The Metal device, or None; says which it is, or why there is none."""
    if not has_metal():
        console.print(
            "metal: not here; it needs a Mac with Apple silicon and PyObjC "
            "(pip install pyobjc-framework-Metal)",
            highlight=False,
        )
        return None
    from krnl.backends.metal import MetalBackend

    metal = _opened(console, "metal", MetalBackend)
    if metal is None:
        return None
    console.print(
        f"metal: {escape(metal.device_name)}, may use {metal.limits.memory / 2**30:.1f} GiB, at "
        f"most {metal.limits.largest_block / 2**30:.1f} GiB in one piece",
        highlight=False,
    )
    return metal


def _cuda(console: Console) -> "CudaBackend | None":
    """The CUDA device, or None; says which it is, or why there is none. Its kernels are compiled
    one by one, as the step needs them."""
    if not has_cuda():
        console.print(
            "cuda: not here; it needs an NVIDIA GPU (Ampere or later), its driver, and "
            f"{escape(PACKAGES)}",
            highlight=False,
        )
        return None
    from krnl.backends.cuda import CudaBackend

    cuda = _opened(console, "cuda", CudaBackend)
    if cuda is None:
        return None
    console.print(
        f"cuda: {escape(cuda.device_name)}, {cuda.driver}, {cuda.limits.memory / 2**30:.1f} of "
        f"{cuda.limits.largest_block / 2**30:.1f} GiB free",
        highlight=False,
    )
    return cuda


def _cpu(isa: str) -> CpuBackend:
    """The CPU with that instruction set."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        return CpuBackend()
    finally:
        os.environ.pop(ISA_VARIABLE) if before is None else os.environ.update(
            {ISA_VARIABLE: before}
        )


def _check(
    console: Console,
    model: Model,
    exact: np.ndarray,
    backend: Backend,
    name: str,
    activation: DType,
) -> bool:
    """One step against the reference's gradients."""
    try:
        error = _difference(one_step(model, backend, activation), exact)
    except KrnlError as failure:
        console.print(
            f"[red]FAIL[/] one step on {name} in {activation}: {escape(str(failure))}",
            highlight=False,
        )
        return False
    # Gradients pass through some thirty roundings to the activation type, which add like a random
    # walk, and float32 sums of up to 199 terms.
    allowed = 30**0.5 * activation.eps + 199**0.5 * F32.eps
    ok = bool(error <= allowed)
    console.print(
        f"{'[green]pass[/]' if ok else '[red]FAIL[/]'} one step on {name} in {activation}: "
        f"gradients within {error:.1e} of the reference (allowed {allowed:.1e})",
        highlight=False,
    )
    return ok


def one_step(model: Model, backend: Backend, activation: DType) -> np.ndarray:
    """The adapter gradients of one pass over random tokens, as one float64 region."""
    adapter = AdapterConfig(rank=8, alpha=16.0)
    modules = initial_modules(adapter, model.config, seed=1)
    random = np.random.default_rng(2)
    modules = {
        path: (a, random.normal(0, 0.02, b.shape).astype(np.float32))
        for path, (a, b) in modules.items()
    }
    weights = model.weights(backend.limits.mapped_alignment)
    planned = plan_training(
        model.config, weights, adapter, tuple(modules), backend, activation, TOKENS
    )
    session = Session(planned, model, modules, backend, seed=0)
    session.loss_scale = initial_scale(activation).value
    work = random_pass(model.config.vocab_size, LIVE, documents=2, labelled=0.5)
    session.accumulate(session.inputs_of(work, 1))
    gradients = session.gradients()
    return np.concatenate([part.ravel() for pair in gradients.values() for part in pair]).astype(
        np.float64
    )


def _model(folder: Path) -> Model:
    """A checkpoint of random weights in bf16."""
    write_json_atomic(folder / "config.json", CONFIG)
    random = np.random.default_rng(0)
    tensors = {
        name: (
            random.normal(1, 0.1, shape) if len(shape) == 1 else random.normal(0, 0.08, shape)
        ).astype(BF16.numpy)
        for name, shape in tensor_shapes(parse(CONFIG, "doctor")).items()
    }
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return Model.open(str(folder))


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
