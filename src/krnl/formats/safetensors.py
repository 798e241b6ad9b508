"""Tensors on disk: the safetensors layout, read without copying and written in one piece.

    8 bytes   N, little-endian
    N bytes   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}; "__metadata__" -> text
    the rest  the tensors, row-major, little-endian, back to back; offsets count from here

(https://github.com/huggingface/safetensors, section "Format".) The header is parsed here, not by a
library, because backends map the file themselves and need to know where each tensor begins.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.errors import FormatError
from krnl.formats.files import open_atomic, read_json
from krnl.strict_json import unique_keys

DTYPES = {"F32": F32, "F16": F16, "BF16": BF16, "I32": I32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")

# The format's own bound: a longer header is damage, not a model.
MAX_HEADER = 100_000_000

# Data begins at a multiple of this, so that a mapped tensor is aligned for vector loads.
ALIGNMENT = 64

# Rotary frequencies that old exports stored; KRNL takes them from config.json.
DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `nbytes` bytes of `path`, from byte `offset` of the file."""

    name: str
    path: Path
    dtype: DType
    shape: Shape
    offset: int
    nbytes: int


class Checkpoint:
    """The weights in a model folder: `tensors` says where each lies, `read` gives the values."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the headers of model.safetensors, or of exactly the files that the index names.

        Without an index, a complete set model-00001-of-0000N.safetensors is taken. FormatError for
        anything missing, damaged, repeated, contradictory, or of a type that is not a float.
        """
        if (folder / INDEX).is_file():
            tensors = _read_indexed(folder)
        else:
            tensors = _read_files(_unindexed_files(folder))
        for tensor in tensors.values():
            if not tensor.dtype.is_float:
                raise FormatError(_unreadable(tensor.path, tensor.name, NAMES[tensor.dtype]))
        return cls(folder, tensors)

    def check(self, expected: Mapping[str, Shape], tied: bool) -> None:
        """Compare names and shapes with what the model needs; FormatError names what differs.

        `tied`: the output head is the embedding. A separate lm_head.weight is then accepted only if
        it holds the same bytes. Stored rotary frequencies are accepted and not used.
        """
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise FormatError(
                f"{self.folder} lacks tensor {missing[0]}{_more(missing)}, "
                "which config.json calls for."
            )
        allowed = {name for name in self.tensors if DERIVED.fullmatch(name)}
        if tied and "lm_head.weight" in self.tensors:
            self._check_tied_head()
            allowed.add("lm_head.weight")
        extra = [name for name in self.tensors if name not in expected and name not in allowed]
        if extra:
            raise FormatError(
                f"{self.tensors[extra[0]].path} holds tensor {extra[0]}{_more(extra)}, "
                "which the model of config.json does not have."
            )
        for name, shape in expected.items():
            tensor = self.tensors[name]
            if tensor.shape != shape:
                raise FormatError(
                    f"{tensor.path}: tensor {name} is {list(tensor.shape)}, "
                    f"but config.json calls for {list(shape)}."
                )

    def read(self, name: str) -> np.ndarray:
        """The values of one tensor: a read-only view into the file, copied by nobody. The file is
        mapped for as long as the view lives, so that pages which were read do not pile up."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.folder} lacks tensor {name}.")
        return _view(np.memmap(tensor.path, mode="r", dtype=np.uint8), tensor)

    def _check_tied_head(self) -> None:
        head, embedding = self.read("lm_head.weight"), self.read("model.embed_tokens.weight")
        if head.dtype != embedding.dtype or not np.array_equal(_raw(head), _raw(embedding)):
            raise FormatError(
                f"{self.tensors['lm_head.weight'].path}: lm_head.weight differs from "
                "model.embed_tokens.weight, but config.json says tie_word_embeddings: true. "
                "Set it to false if the head is its own."
            )


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Where the tensors of one file lie, and its metadata. FormatError for a damaged file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise FormatError(
                    f"{path} is truncated or not a safetensors file: "
                    f"it has {size} bytes and announces a header of {length}."
                )
            text = file.read(length)
    except FileNotFoundError as error:
        raise FormatError(f"{path} does not exist.") from error
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except ValueError as error:
        raise FormatError(f"{path} has a damaged header: {error}.") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged header: it must be a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(f"{path} has a damaged header: __metadata__ must map text to text.")
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_extent(path, list(tensors.values()), 8 + length, size)
    return tensors, metadata


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of one file, as read-only views into the mapped file, and the file's metadata."""
    tensors, metadata = read_header(path)
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    return {name: _view(mapped, tensor) for name, tensor in tensors.items()}, metadata


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, whole or not at all. transformers asks for the metadata {"format": "pt"}."""
    layout = {name: (_dtype_of(name, array), array.shape) for name, array in tensors.items()}
    write_safetensors_lazily(path, layout, tensors.__getitem__, metadata)


def write_safetensors_lazily(
    path: Path,
    layout: Mapping[str, tuple[DType, Shape]],
    values: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """As write_safetensors, with one tensor in memory at a time: `values(name)` in file order."""
    # Wide types first keeps every tensor aligned to its own element size.
    order = sorted(layout, key=lambda name: (-layout[name][0].size, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = layout[name]
        begin, end = end, end + math.prod(shape) * dtype.size
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with open_atomic(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            dtype, shape = layout[name]
            array = values(name)
            if array.shape != shape or array.dtype != dtype.numpy:
                raise FormatError(
                    f"{path}: tensor {name} was announced as {dtype}{list(shape)} "
                    f"and came as {array.dtype}{list(array.shape)}."
                )
            file.write(_raw(array).data)


def _read_indexed(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    placed = read_json(index).get("weight_map")
    if (
        not isinstance(placed, dict)
        or not placed
        or not all(isinstance(f, str) for f in placed.values())
    ):
        raise FormatError(f"{index} has no weight_map from tensor names to file names.")
    files = sorted(set(placed.values()))
    if (folder / SINGLE).is_file() and SINGLE not in files:
        raise FormatError(
            f"{folder} holds both {SINGLE} and an index that does not name it. Remove the old one."
        )
    for file in files:
        if Path(file).name != file:
            raise FormatError(
                f"{index} names {file!r}, which is not a plain file name in the same folder."
            )
        if not (folder / file).is_file():
            raise FormatError(f"{folder / file} is missing; {INDEX} names it.")
    tensors = _read_files([folder / file for file in files])
    for name, file in placed.items():
        if name not in tensors:
            raise FormatError(f"{folder / file} lacks tensor {name}, which {INDEX} places there.")
    for name, tensor in tensors.items():
        if name not in placed:
            raise FormatError(f"{tensor.path} holds tensor {name}, which {INDEX} does not name.")
        if placed[name] != tensor.path.name:
            raise FormatError(
                f"Tensor {name} is in {tensor.path}, but {INDEX} places it in {placed[name]}."
            )
    return tensors


def _read_files(paths: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_header(path)[0].items():
            if name in tensors:
                raise FormatError(f"Tensor {name} is in both {tensors[name].path} and {path}.")
            tensors[name] = tensor
    return tensors


def _unindexed_files(folder: Path) -> list[Path]:
    shards = sorted(path for path in folder.glob("*.safetensors") if SHARD.fullmatch(path.name))
    if (folder / SINGLE).is_file():
        if shards:
            raise FormatError(
                f"{folder} holds both {SINGLE} and {shards[0].name}, and no index. Remove one."
            )
        return [folder / SINGLE]
    if shards:
        count = max(int(path.stem.rsplit("-", 1)[1]) for path in shards)
        complete = [
            folder / f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
        ]
        for path in complete:
            if not path.is_file():
                raise FormatError(f"{path} is missing.")
        return complete
    raise FormatError(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder."
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_model.safetensors" in names:
        return f"{folder} holds an adapter, not a model."
    for suffix, kind in (
        (".bin", "pickled"),
        (".pth", "pickled"),
        (".pt", "pickled"),
        (".gguf", "GGUF"),
    ):
        found = [name for name in names if name.endswith(suffix)]
        if found:
            return (
                f"{folder} holds {kind} weights ({found[0]}) and no safetensors, which KRNL needs; "
                "look for a safetensors version of this model or convert it."
            )
    return f"{folder} holds no weights: neither {SINGLE} nor {INDEX}."


def _parse_entry(path: Path, name: str, entry: object, start: int) -> Tensor:
    damaged = FormatError(f"{path} has a damaged header: the entry of tensor {name} is {entry!r}.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise damaged
    dtype, (begin, end) = DTYPES.get(str(entry["dtype"])), offsets
    if dtype is None:
        raise FormatError(_unreadable(path, name, entry["dtype"]))
    nbytes = math.prod(shape) * dtype.size
    if end - begin != nbytes:
        raise FormatError(
            f"{path}: tensor {name} is {dtype}{shape}, {nbytes} bytes, "
            f"but its data_offsets span {end - begin}."
        )
    return Tensor(name, path, dtype, tuple(shape), start + begin, nbytes)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extent(path: Path, tensors: list[Tensor], start: int, size: int) -> None:
    """The format allows neither holes nor overlaps: the tensors must fill the rest exactly."""
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            fault = (
                "overlaps the tensor before it"
                if tensor.offset < end
                else "leaves a hole before it"
            )
            raise FormatError(f"{path}: tensor {tensor.name} {fault}.")
        end += tensor.nbytes
    if size < end:
        raise FormatError(f"{path} is truncated: {size} bytes of {end}. Copy or download it again.")
    if size > end:
        raise FormatError(f"{path} has {size - end} bytes after its last tensor.")


def _unreadable(path: Path, name: str, dtype: object) -> str:
    return (
        f"{path}: tensor {name} is stored as {dtype}. KRNL reads F32, F16 and BF16 weights; "
        "quantised checkpoints are not supported, so use the unquantised version of this model."
    )


def _dtype_of(name: str, array: np.ndarray) -> DType:
    for dtype in DTYPES.values():
        if dtype.numpy == array.dtype:
            return dtype
    raise FormatError(f"Tensor {name} is {array.dtype}, which KRNL does not store.")


def _view(mapped: np.ndarray, tensor: Tensor) -> np.ndarray:
    data = mapped[tensor.offset : tensor.offset + tensor.nbytes]
    return np.asarray(data).view(tensor.dtype.numpy).reshape(tensor.shape)


def _raw(array: np.ndarray) -> np.ndarray:
    """The bytes of `array` in row-major order, uint8[nbytes]; no copy where it already lies so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
