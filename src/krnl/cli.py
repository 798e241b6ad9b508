"""The command line. Each command imports what it needs when it runs, so that `krnl --help` answers
at once."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from krnl.errors import BackendError, ConfigError, KrnlError, Refused, TrainingError

if TYPE_CHECKING:
    from rich.console import Console

    from krnl.training.config import TrainConfig

    Settings = TypeVar("Settings", bound=TrainConfig)

HELP = """usage: krnl COMMAND [OPTIONS]

KRNL fine-tunes large language models with LoRA on the machine you have.

commands:
  train     fine-tune a model               krnl train examples/storyteller/train.yaml
  plan      memory and work of a run        krnl plan MODEL --tokens 2048
  profile   where the time of a pass goes   krnl profile MODEL --tokens 1024
  bench     repeat a table of measurements  krnl bench gemm
  generate  continue a prompt               krnl generate MODEL --adapter DIR "Tell me a story."
  merge     fold an adapter into its model  krnl merge MODEL ADAPTER OUT
  doctor    check this machine

`krnl COMMAND --help` lists the options of a command. `krnl --version` prints the version.
"""


def main() -> None:
    """Entry point: exits with 0, with 2 for a user's mistake, 1 for a failure, 3 where a figure
    would not be worth printing, 130 after Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before the program began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open to the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or – gets a ?
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
        return code
    except (BackendError, TrainingError) as error:
        return _complain(str(error), 1)
    except Refused as refusal:
        return _complain(str(refusal), 3)
    except KrnlError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("Stopped.", 130)
    except BrokenPipeError:
        _abandon_output()  # the reader has gone; there is nobody to tell
        return 0
    except OSError as error:
        if error.filename is not None:  # it may not be read, has too long a name, or the like
            return _complain(f"{error.filename} cannot be used: {error.strerror or error}.", 2)
        _abandon_output()
        return _complain(f"The output cannot be written: {error.strerror or error}.", 1)


def _run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from krnl import __version__

        print(f"krnl {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"There is no command '{arguments[0]}'.{hint} `krnl --help` lists them.")
    return command(arguments[1:])


def _abandon_output() -> None:
    """Lets what is still buffered for standard output go nowhere, or Python fails on it at exit."""
    with suppress(OSError, ValueError):  # it may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    print(f"krnl: {message}", file=sys.stderr)
    return code


def _console(markup: bool = True) -> "Console":
    """Standard output. Where it is no terminal, tables are not squeezed. When its reader has gone,
    nothing more is said, and the command does the rest of its work."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            _abandon_output()

    return Output(markup=markup, width=None if sys.stdout.isatty() else 160)


def _parse(kind: type, name: str, arguments: list[str], default: Any = None) -> Any:
    """Flags of a dataclass's fields. Unknown flags and wrong values end the program with code 2."""
    import tyro

    return tyro.cli(kind, prog=f"krnl {name}", args=arguments, default=default)


def _settings(
    name: str, arguments: list[str], kind: "type[Settings]", bare_model: bool
) -> "Settings":
    """TrainConfig, or one of its kind, from an optional YAML file and flags, which win. Where a
    `bare_model` is allowed, the first word may also be the model."""
    from krnl.formats.files import user_path
    from krnl.training.config import from_yaml

    first, is_word = arguments[0] if arguments else "", bool(arguments) and arguments[0][:1] != "-"
    default = kind()
    if is_word and first.endswith((".yaml", ".yml")):
        default, arguments = kind(**vars(from_yaml(user_path(first)))), arguments[1:]
    elif is_word and bare_model:
        default, arguments = kind(model=first), arguments[1:]
    elif is_word:
        raise ConfigError(
            f"'{first}' is neither a .yaml file nor a flag; a model is given as --model."
        )
    settings: Settings = _parse(kind, name, arguments, default)
    return settings


def train(arguments: list[str]) -> int:
    """krnl train [FILE.yaml] [flags]"""
    from krnl.training.config import TrainConfig

    config = _settings("train", arguments, TrainConfig, bare_model=False)
    from krnl.training.loop import Interrupted
    from krnl.training.loop import train as run_training

    console = _console(markup=False)
    try:
        result = run_training(config, console)
    except Interrupted as interrupted:
        return _complain(str(interrupted), 130)
    if result is not None:
        console.print(result.describe(), highlight=False, soft_wrap=True)
    return 0


def plan(arguments: list[str]) -> int:
    """krnl plan [MODEL | FILE.yaml] [flags of train] [--dispatches]"""
    from krnl.options import PlanOptions

    options = _settings("plan", arguments, PlanOptions, bare_model=True)
    from krnl.devices import activation_type, planning_device
    from krnl.planning import plan_run, print_plan

    options.check(needs_data=False)
    backend = planning_device(options.device)
    planned = plan_run(options, backend, activation_type(backend, options.precision))
    print_plan(planned, _console(), options.dispatches)
    return 0


def profile(arguments: list[str]) -> int:
    """krnl profile [MODEL | FILE.yaml] [flags of train] [--documents N] [--by label] …"""
    from krnl.options import ProfileOptions, check_flags, check_outputs, passed_over

    check_flags(arguments)
    options = _settings("profile", arguments, ProfileOptions, bare_model=True)
    from krnl.profile import profile_run
    from krnl.profile_report import report

    options.check(needs_data=False)
    check_outputs(options, "json", "trace", "png")
    console = _console(markup=False)
    if words := passed_over(options):
        console.print(words, highlight=False, soft_wrap=True)
    measured = profile_run(options, options.documents, options.labelled, options.force)
    report(measured, options, console)
    return 0


def bench(arguments: list[str]) -> int:
    """krnl bench [TABLE] [flags]"""
    from krnl.options import BenchOptions, check_outputs

    options = _parse(BenchOptions, "bench", arguments)
    from krnl.bench.command import run_table
    from krnl.training.signals import exit_on_signals

    check_outputs(options, "json", "png")
    with exit_on_signals():
        run_table(options, _console(markup=False))
    return 0


def generate(arguments: list[str]) -> int:
    """krnl generate MODEL [PROMPT] [flags]"""
    from krnl.options import GenerateOptions

    options = _parse(GenerateOptions, "generate", arguments)
    from krnl.answering import answer

    answer(options)
    return 0


def merge(arguments: list[str]) -> int:
    """krnl merge MODEL ADAPTER OUT"""
    from krnl.options import MergeOptions

    options = _parse(MergeOptions, "merge", arguments)
    from krnl.devices import open_backend
    from krnl.formats.files import user_path
    from krnl.merge import merge as merge_models
    from krnl.model import Model

    model = Model.open(options.model)
    adapter = model.read_adapter(user_path(options.adapter))
    merged = merge_models(model, adapter, user_path(options.out), open_backend("auto"))
    print(
        f"{merged.tensors} layers merged into {merged.out}. On a probe text the merged model's "
        "logits differ from the "
        f"adapter's by at most {merged.logits_error:.2e} of the largest; rounding moved weights by "
        "at most "
        f"{merged.largest_rounding:.2e} of their tensor's largest."
    )
    return 0


def doctor(arguments: list[str]) -> int:
    """krnl doctor"""
    from krnl.options import DoctorOptions

    _parse(DoctorOptions, "doctor", arguments)
    from krnl.doctor import examine

    return 0 if examine(_console()) else 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "profile": profile,
    "bench": bench,
    "generate": generate,
    "merge": merge,
    "doctor": doctor,
}
