"""What a checkpoint's headers say of its tensors: names, shapes, stored bytes. No weight is read.

Knows nothing of what a tensor is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from convert.errors import ConvertError
from model.config import ModelConfig
from model.folder_headers import check_entries, read_folder
from model.safetensors_header import INDEX, WeightsError, read_header
from model.shard_index import read_index

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor. dtype is None where the stored type is not a plain float: then only stored_bytes is known."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    stored_bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def from_safetensors(folder: Path) -> tuple[StoredTensor, ...] | None:
    """Every tensor of the folder's safetensors files; None if there are none. Raises ConvertError for damage."""
    files = _shards(folder)
    return tuple(tensor for file in files for tensor in _read_header(file)) if files else None


def refusal(folder: Path, config: ModelConfig) -> str | None:
    """Why `ropeway serve` would not load what the headers promise, in one line; None if it would."""
    try:
        check_entries(read_folder(folder), config)
    except WeightsError as error:
        return str(error)
    return None


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        return sorted({folder / name for name in read_index(index).values()})
    except WeightsError as error:
        raise ConvertError(str(error), folder) from None


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        entries = read_header(path).entries
    except WeightsError as error:
        raise ConvertError(str(error), path.parent) from None
    return [StoredTensor(name, row.shape, FLOATS.get(row.dtype), row.nbytes) for name, row in entries.items()]
