"""Find a model: a folder on this machine, or a Hugging Face hub id, downloaded once and cached."""

import re
from pathlib import Path

from krnl.errors import ConfigError
from krnl.formats.files import user_path

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# What KRNL reads, and nothing else: many repositories also hold the same weights in other formats.
# Sub-folders never match, since a pattern has to match from the first character of the path.
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*",
)
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def resolve(model: str, weights: bool = True) -> Path:
    """The folder of a model given as a path or as a hub id, owner/name.

    A folder that exists is taken as it is. From the hub the weights come only if wanted.
    ConfigError if there is neither or the download fails.
    """
    path = user_path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"{model} is a file. Give the folder that holds config.json and the weights."
        )
    if not HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{model!r} is neither a folder that exists nor a hub id of the form owner/name."
        )
    return _download(model, SETTINGS + WEIGHTS if weights else SETTINGS)


def _download(model: str, patterns: tuple[str, ...]) -> Path:
    # Imported late: it costs a noticeable part of a second, which a local folder need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ConfigError(
            f"{model} is gated. Accept its licence on the hub, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a folder here nor a model on the hub, "
            "or it is private and you are not logged in."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model} is no folder here, not in the download cache, and the hub cannot be reached."
        ) from error
    except (OSError, ValueError) as error:  # connection errors, a full disk, an id the hub refuses
        raise ConfigError(f"{model} could not be downloaded: {error}") from error
