"""`krnl bench TABLE`: opens a device and its gate, hands both to a table, shows what it yields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from os.path import expanduser
from shutil import which
from typing import cast

from rich.console import Console

from krnl.backends.base import Backend
from krnl.bench.baselines import PEERS, TORCH_VARIANTS, scripts
from krnl.bench.control import machine, open_gate
from krnl.bench.gate import Gate, Measurement
from krnl.bench.results import Entry, Result, Tool, print_result, write_picture, write_result
from krnl.devices import open_backend
from krnl.errors import ConfigError
from krnl.formats.files import user_path
from krnl.options import BenchOptions
from krnl.training.config import check_memory_limit

# Each is a module of krnl.bench.tables with `run(bench: Bench) -> Result`.
TABLES = {
    "types": "a matrix product in each element type",
    "gemm": "products nn, tn and nt, beside the platform's own library",
    "nt": "ways to read a transposed operand",
    "tiles": "sizes of a threadgroup's tile",
    "splitk": "narrow products of LoRA, with the sum cut up and without",
    "shapes": "the products of models' layers, beside PyTorch's: cuBLAS on a GPU of NVIDIA",
    "step": "one MLP block forward and backward, beside MLX and PyTorch",
    "hetero": "the CPU and the GPU alone and at once, and how to divide the work",
    "attention": "attention over the number of tokens: scores in memory, and in tiles",
    "layer": "a whole decoder layer forward and backward",
    "model": "training steps of named models: tokens/s and memory",
}
# Options that not every table heeds, and those that do.
OF_TABLES = {
    "model": ("model",),
    "rows": ("model",),
    "length": ("model", "step"),
    "chat": ("model",),
    "memory_limit": ("model",),
    "adapters": ("step", "model"),
}
LEAST_LENGTH = 16  # so that a third of a quarter is something to train
LEAST_ROUNDS = 3  # of fewer, a median is no better than any of them, and quartiles say nothing


@dataclass(frozen=True)
class Bench:
    """What a table is handed."""

    backend: Backend
    gate: Gate
    rounds: int
    quick: bool  # small sizes, to see that it works
    against: Mapping[str, str]  # peer -> interpreter that has it
    variants: Sequence[str] = ("eager",)  # how PyTorch is run
    adapters: str = "both"  # of peers, where the base has 16 bits: "16", "fp32" or "both"
    # What a table trains or how long it is; None is its own choice.
    model: str | None = None
    rows: int | None = None
    length: int | None = None
    chat: bool = False
    memory_limit: float | None = None  # GiB that KRNL may take; peers do not heed it

    def result(
        self,
        command: str,
        title: str,
        measurement: Measurement | None,
        entries: Iterable[Entry],
        tools: Iterable[Tool] = (),
    ) -> Result:
        """What a table yields, and how it was asked for."""
        return Result(
            command,
            title,
            machine(self.backend),
            self.quick,
            self.rounds,
            measurement,
            tuple(entries),
            tuple(tools),
            self.flags,
        )

    @property
    def flags(self) -> str:
        """What decides what is measured, as on the command line."""
        given = {name: getattr(self, name) for name in OF_TABLES}
        given["against"] = ",".join(self.against) or None
        given["variants"] = ",".join(self.variants)
        named = {
            name.replace("_", "-"): value
            for name, value in given.items()
            if value != getattr(BenchOptions, name)
        }
        return " ".join(
            f"--{name}" if value is True else f"--{name} {value}" for name, value in named.items()
        )


def run_table(options: BenchOptions, console: Console) -> None:
    """What `krnl bench` does. Refused, and no figure printed, unless the machine is quiet or
    `force` is given."""
    check(options)
    check_table_options(options)
    against, variants = peers(options), chosen_variants(options)
    if not options.table and not options.relearn:
        list_tables(console)
        return
    backend = open_backend(options.device)
    gate = open_gate(backend, options.force)
    if options.relearn:
        console.print(gate.relearn(), highlight=False, soft_wrap=True)
    if options.table:
        bench = Bench(
            backend,
            gate,
            options.rounds,
            options.quick,
            against,
            variants,
            options.adapters,
            options.model,
            options.rows,
            options.length,
            options.chat,
            options.memory_limit,
        )
        show(table(options.table)(bench), options, console)


def check(options: BenchOptions) -> None:
    """ConfigError for a table that is not there, and for options that nothing would use."""
    if options.table and options.table not in TABLES:
        near = get_close_matches(options.table, TABLES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"There is no table '{options.table}'.{hint} There are {', '.join(TABLES)}."
        )
    if options.rounds < 1:
        raise ConfigError(f"rounds is {options.rounds}; it must be at least 1.")
    if options.rounds < LEAST_ROUNDS and not options.force:
        raise ConfigError(
            f"rounds is {options.rounds}, and a figure worth printing takes at least "
            f"{LEAST_ROUNDS}; with --force fewer do."
        )
    used = ("relearn", "device") if options.relearn else ()
    given = [f.name for f in fields(options) if getattr(options, f.name) != f.default]
    if unused := [name for name in given if not options.table and name not in used]:
        verb, them = ("is", "it") if len(unused) == 1 else ("are", "them")
        raise ConfigError(
            f"{', '.join(unused)} {verb} given without a table, and only a table uses {them}: krnl "
            "bench TABLE. Without anything, krnl bench lists the tables."
        )


def check_table_options(options: BenchOptions) -> None:
    """ConfigError for an option that the table does not heed, and for what is to be trained, if it
    makes no sense."""
    given = {name: getattr(options, name) for name in OF_TABLES}
    for name, value in given.items():
        if value != getattr(BenchOptions, name) and options.table not in OF_TABLES[name]:
            tables = " and ".join(f"krnl bench {table}" for table in OF_TABLES[name])
            verb = "uses" if len(OF_TABLES[name]) == 1 else "use"
            raise ConfigError(f"{name} is given, and only {tables} {verb} it.")
    for name, least in (("rows", 1), ("length", LEAST_LENGTH)):
        if given[name] is not None and given[name] < least:
            raise ConfigError(f"{name} is {given[name]}; it must be at least {least}.")
    check_memory_limit(options.memory_limit)


def table(name: str) -> Callable[[Bench], Result]:
    """The function that measures a table. Only its own module is imported."""
    return cast(Callable[[Bench], Result], import_module(f"krnl.bench.tables.{name}").run)


def show(result: Result, options: BenchOptions, console: Console) -> None:
    """Prints a table and writes the files that were asked for."""
    print_result(result, console)
    if options.json is not None:
        write_result(result, user_path(options.json))
    if options.png is not None:
        write_picture(result, user_path(options.png))


def peers(options: BenchOptions) -> dict[str, str]:
    """The interpreters of the peers that are to be measured against. ConfigError if one is not
    there, or the scripts that it is to run, or if an interpreter is given for nothing."""
    given = {"mlx": options.mlx_python, "torch": options.torch_python}
    named = [] if options.against is None else [w.strip() for w in options.against.split(",")]
    for name, python in given.items():
        if python is not None and name not in named:
            raise ConfigError(f"{name}_python is given, but against does not name {name}.")
    found = {}
    for name in named:
        if options.table not in PEERS:
            raise ConfigError(
                f"against names '{name}', but only the tables {', '.join(PEERS)} have peers."
            )
        if name not in PEERS[options.table]:
            known = ", ".join(PEERS[options.table])
            raise ConfigError(f"against names '{name}'; of {options.table} it may name {known}.")
        python = given[name]
        if python is None:
            raise ConfigError(
                f"against names {name}: give the Python that has it, --{name}-python."
            )
        if name in found:
            raise ConfigError(f"against names {name} twice.")
        program = which(expanduser(python))
        if program is None:
            raise ConfigError(
                f"{name}_python is '{python}', and there is no such program: no file that can be "
                "run, and none of that name on the PATH."
            )
        found[name] = program
    if found:
        scripts()
    elif options.adapters != BenchOptions.adapters:
        raise ConfigError("adapters are the peers', and against names none.")
    return found


def chosen_variants(options: BenchOptions) -> tuple[str, ...]:
    """How PyTorch is to be run. ConfigError for a name that the table does not know, one given
    twice, or any where PyTorch takes no part."""
    default = BenchOptions().variants
    if options.variants == default:
        return (default,)
    if "torch" not in peers(options):
        raise ConfigError("variants are PyTorch's, and against does not name torch.")
    named = tuple(word.strip() for word in options.variants.split(","))
    known = TORCH_VARIANTS[options.table]
    for name in named:
        if name not in known:
            raise ConfigError(
                f"variants names '{name}'; of {options.table} it may name {', '.join(known)}."
            )
        if named.count(name) > 1:
            raise ConfigError(f"variants names {name} twice.")
    return named


def list_tables(console: Console) -> None:
    """One line for each table."""
    for name, line in TABLES.items():
        console.print(f"{name:10} {line}", highlight=False)
    console.print("\n`krnl bench TABLE` measures one; `krnl bench --help` lists the options.")
