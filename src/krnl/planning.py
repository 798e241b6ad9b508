"""`krnl plan`: what a training run will hold, compute and launch, before anything is allocated. It
needs config.json alone; weights, tokenizer and data are taken into account where they are here."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from krnl.backends.base import Backend, Paper
from krnl.dtypes import DType
from krnl.errors import ConfigError
from krnl.formats import hub
from krnl.formats.files import user_path
from krnl.formats.peft import AdapterConfig, check_fits, read_adapter
from krnl.formats.safetensors import INDEX, SINGLE
from krnl.model import Model, imagined_weights, stored_dtype
from krnl.models import config as model_config
from krnl.models.config import ModelConfig, linear_paths
from krnl.plan.arena import Plan
from krnl.training.budget import LIMIT, BudgetedPlan, plan_within
from krnl.training.config import TrainConfig
from krnl.training.memory import gib
from krnl.training.prepare import adapter_config, counted, load_data, starting_adapter


@dataclass(frozen=True)
class Planned:
    """A training plan with what it was made for."""

    name: str
    plan: BudgetedPlan
    backend: Backend | Paper
    precision: str
    trained: int
    layers: int
    has_weights: bool


def plan_run(config: TrainConfig, backend: Backend | Paper, activation: DType) -> Planned:
    """Plans the run that `krnl train` would make of these settings; `data` may be missing."""
    folder = _folder(config.model)
    shape = model_config.load(folder)
    has_weights = (folder / SINGLE).exists() or (folder / INDEX).exists()
    if has_weights:
        model = Model.open(str(folder))
        weights = model.weights(backend.limits.mapped_alignment)
        # What these take in memory counts as the process's own, as in the run.
        loaded = load_data(config, model) if config.data else None
        adapter, modules = starting_adapter(config, model)
        paths = tuple(modules)
    else:
        alignment = backend.limits.mapped_alignment
        weights, loaded = imagined_weights(shape, stored_dtype(folder), alignment), None
        adapter, paths = _adapter(config, shape)
    planned = plan_within(
        config.memory_limit,
        config.recompute,
        shape,
        weights,
        adapter,
        paths,
        backend,
        activation,
        config.tokens,
    )
    trained = planned.training.decoder.trainable.size
    del loaded
    return Planned(shape.name, planned, backend, str(activation), trained, len(paths), has_weights)


def print_plan(planned: Planned, console: Console, dispatches: bool) -> None:
    """The memory table, the work of a pass, and the dispatch list (or a summary of it)."""
    training, use = planned.plan.training, planned.plan.use
    capacity = training.programs.capacity
    console.print(
        f"[bold]{escape(planned.name)}[/] on {planned.backend.name} in {planned.precision}: "
        f"passes of up to {capacity:,} tokens, adapters on "
        f"{counted(planned.layers, 'linear layer')}, "
        f"{planned.trained:,} trained parameters"
        + ("" if planned.has_weights else " (no weights here: their files are imagined)"),
        highlight=False,
    )
    memory = Table("memory", "bytes", box=None, pad_edge=False)
    memory.columns[1].justify = "right"
    for name, nbytes in use.parts().items():
        memory.add_row(name, gib(nbytes))
    memory.add_row("[bold]peak", f"[bold]{gib(use.total)}")
    if use.hosted:
        memory.add_row("weights, in the host's memory", gib(use.hosted))
    console.print(memory)
    if again := planned.plan.recomputed:
        console.print(again, highlight=False, soft_wrap=True)
    if isinstance(planned.backend, Paper):
        unknown = ": the plan is right, but whether the memory there suffices is not known"
        console.print(
            f"{planned.backend.name} is not on this machine"
            + ("" if planned.plan.budget.source == LIMIT else unknown),
            soft_wrap=True,
        )
    if shortage := planned.plan.shortage():
        console.print(shortage, highlight=False, soft_wrap=True)
    work = Table("program", "dispatches", "GFLOP at capacity", box=None, pad_edge=False)
    for column in work.columns[1:]:
        column.justify = "right"
    programs = (training.accumulate, training.update, training.evaluate)
    for program in programs:
        work.add_row(program.name, str(len(program.dispatches)), f"{program.flops / 1e9:,.1f}")
    console.print(work)
    for program in programs:
        _print_dispatches(program, console, dispatches)


def _print_dispatches(program: Plan, console: Console, every: bool) -> None:
    """Each dispatch on a line, or how many there are of each kernel."""
    table = Table(program.name, "kernel", "MFLOP", "MB", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    if every:
        for dispatch in program.dispatches:
            call = dispatch.call
            table.add_row(
                call.label,
                dispatch.row.name,
                f"{call.flops / 1e6:,.1f}",
                f"{call.nbytes / 1e6:,.2f}",
            )
    else:
        counts = Counter(d.row.name for d in program.dispatches)
        for name, count in counts.most_common():
            calls = [d.call for d in program.dispatches if d.row.name == name]
            flops, nbytes = sum(c.flops for c in calls), sum(c.nbytes for c in calls)
            table.add_row(f"{count} ×", name, f"{flops / 1e6:,.1f}", f"{nbytes / 1e6:,.2f}")
    console.print(table)


def _adapter(config: TrainConfig, shape: ModelConfig) -> tuple[AdapterConfig, tuple[str, ...]]:
    """The adapter that the run would train, new or given, and the layers that it is on, without
    weights to put it on."""
    if config.init_adapter is None:
        adapter = adapter_config(config)
        return adapter, adapter.select(linear_paths(shape))
    adapter, modules = read_adapter(user_path(config.init_adapter))
    check_fits(modules, linear_paths(shape), config.init_adapter)
    return replace(adapter, dropout=config.dropout), tuple(modules)


def _folder(model: str) -> Path:
    if not model:
        raise ConfigError("model is missing: give a folder or a hub id.")
    path = user_path(model)
    return (
        path.parent
        if path.name == "config.json" and path.is_file()
        else hub.resolve(model, weights=False)
    )
