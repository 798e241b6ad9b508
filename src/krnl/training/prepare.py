"""What a run is made of, before there is a plan: data, read and packed, and the adapter to start
from."""

from dataclasses import dataclass, replace
from pathlib import Path

from krnl.data.examples import Examples, build
from krnl.data.packing import Pass, pack
from krnl.data.rows import read_rows, split
from krnl.formats.files import user_path
from krnl.formats.peft import AdapterConfig, Modules
from krnl.model import Model, initial_modules
from krnl.training.config import TrainConfig

# Settings that an adapter to start from brings with it.
ADAPTERS_OWN = ("rank", "alpha", "targets", "rslora", "rank_pattern", "alpha_pattern")


@dataclass
class Data:
    """Training examples, and validation packed into passes."""

    train: Examples
    valid: list[Pass]

    @property
    def valid_targets(self) -> int:
        return sum(len(work.target) for work in self.valid)


def load_data(config: TrainConfig, model: Model) -> Data:
    """Reads, tokenises and packs."""
    train_file, valid_file = split(user_path(config.data))
    if config.valid is not None:
        valid_file = split(user_path(config.valid))[0]
    longest = config.max_length or config.tokens

    def examples(path: Path) -> Examples:
        return build(read_rows(path), model.tokenizer, config.train_on, longest)

    valid = pack(examples(valid_file).examples, config.tokens) if valid_file else []
    return Data(examples(train_file), valid)


def starting_adapter(config: TrainConfig, model: Model) -> tuple[AdapterConfig, Modules]:
    """A fresh adapter as the settings describe it, or the one to start from."""
    if config.init_adapter is not None:
        adapter, modules = model.read_adapter(user_path(config.init_adapter))
        return replace(adapter, dropout=config.dropout, base_model=config.model), modules
    adapter = adapter_config(config)
    return adapter, initial_modules(adapter, model.config, config.seed)


def adapter_config(config: TrainConfig) -> AdapterConfig:
    """The adapter that the settings describe."""
    return AdapterConfig(
        rank=config.rank,
        alpha=config.alpha,
        targets="all-linear" if config.targets == ("all-linear",) else config.targets,
        rslora=config.rslora,
        dropout=config.dropout,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        base_model=config.model,
    )


def counted(number: int, what: str) -> str:
    """So many of something, for people."""
    return f"{number:,} {what}" + "s" * (number != 1)
