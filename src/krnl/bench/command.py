"""`krnl bench TABLE`: opens a device and its gate, hands both to a table, shows what it yields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import cast

from rich.console import Console

from krnl.backends.base import Backend
from krnl.bench.control import open_gate
from krnl.bench.gate import Gate
from krnl.bench.results import Result, print_result, write_picture, write_result
from krnl.devices import open_backend
from krnl.errors import ConfigError
from krnl.options import BenchOptions

# Each is a module of krnl.bench.tables with `run(bench: Bench) -> Result`.
TABLES = {
    "types": "a matrix product in each element type",
    "gemm": "products nn, tn and nt, beside the platform's own library",
    "nt": "ways to read a transposed operand",
    "tiles": "sizes of a threadgroup's tile",
    "splitk": "narrow products of LoRA, with the sum cut up and without",
    "step": "one MLP block forward and backward, beside MLX and PyTorch",
    "hetero": "the CPU and the GPU alone and at once, and how to divide the work",
    "attention": "attention over the number of tokens: scores in memory, and in tiles",
    "layer": "a whole decoder layer forward and backward",
    "model": "training steps of named models: tokens/s and memory",
}
WITH_PEERS = ("step", "model")  # tables that take them


@dataclass(frozen=True)
class Bench:
    """What a table is handed."""

    backend: Backend
    gate: Gate
    rounds: int
    quick: bool  # small sizes, to see that it works
    against: Mapping[str, str]  # peer -> interpreter that has it


def run_table(options: BenchOptions, console: Console) -> None:
    """What `krnl bench` does. Refused, and no figure printed, unless the machine is quiet or
    `force` is given."""
    if options.table and options.table not in TABLES:
        near = get_close_matches(options.table, TABLES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"There is no table '{options.table}'.{hint} There are {', '.join(TABLES)}."
        )
    if options.rounds < 1:
        raise ConfigError(f"rounds is {options.rounds}; it must be at least 1.")
    against = peers(options)
    if not options.table and not options.relearn:
        list_tables(console)
        return
    backend = open_backend(options.device)
    gate = open_gate(backend, options.force)
    if options.relearn:
        console.print(gate.relearn(), highlight=False, soft_wrap=True)
    if options.table:
        result = table(options.table)(Bench(backend, gate, options.rounds, options.quick, against))
        show(result, options, console)


def table(name: str) -> Callable[[Bench], Result]:
    """The function that measures a table. Only its own module is imported."""
    return cast(Callable[[Bench], Result], import_module(f"krnl.bench.tables.{name}").run)


def show(result: Result, options: BenchOptions, console: Console) -> None:
    """Prints a table and writes the files that were asked for."""
    print_result(result, console)
    if options.json is not None:
        write_result(result, Path(options.json))
    if options.png is not None:
        write_picture(result, Path(options.png))


def peers(options: BenchOptions) -> dict[str, str]:
    """The interpreters of the peers that are to be measured against."""
    given = {"mlx": options.mlx_python, "torch": options.torch_python}
    found = {}
    for name in [word.strip() for word in (options.against or "").split(",") if word.strip()]:
        if options.table not in WITH_PEERS:
            raise ConfigError(
                f"against names '{name}', but only {' and '.join(WITH_PEERS)} have peers."
            )
        if name not in given:
            raise ConfigError(f"against names '{name}'; it may name {', '.join(given)}.")
        python = given[name]
        if python is None:
            raise ConfigError(
                f"against names {name}: give the Python that has it, --{name}-python."
            )
        if not Path(python).expanduser().is_file():
            raise ConfigError(f"{name}_python is '{python}', and there is no such file.")
        found[name] = str(Path(python).expanduser())
    return found


def list_tables(console: Console) -> None:
    """One line for each table."""
    for name, line in TABLES.items():
        console.print(f"{name:10} {line}", highlight=False)
    console.print("\n`krnl bench TABLE` measures one; `krnl bench --help` lists the options.")
