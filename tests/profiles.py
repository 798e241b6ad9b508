"""A profile of the storyteller's model to look at, and what is printed of one."""

from functools import cache
from pathlib import Path

from rich.console import Console

from krnl.profile import Profile, profile_run
from krnl.profile_report import print_profile
from krnl.training.config import TrainConfig
from open_gate import OpenGate

MODEL = str(Path(__file__).parent.parent / "examples" / "storyteller" / "model")
CONFIG = TrainConfig(model=MODEL, tokens=256)


@cache
def profiled() -> Profile:
    return profile_run(CONFIG, documents=4, labelled=0.25, gate=OpenGate())


def printed(profile: Profile, width: int = 200, **options: object) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        print_profile(profile, console, **options)
    return capture.get()
