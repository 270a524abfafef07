"""What a checkpoint's headers say of its tensors: names, shapes, stored bytes. No weight is read.

Knows nothing of configs or of what a tensor is for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.formats.gguf_header import TensorRow

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
GGML_FLOATS = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
GGML_QUANTISED = "float32"
"""What the converter expands quantised blocks to unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor. dtype is None where the stored type is not a plain float: then only stored_bytes is known."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    stored_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def from_gguf(rows: Sequence[TensorRow]) -> tuple[StoredTensor, ...]:
    """Tensors as they are after conversion: plain types stay, quantised blocks become GGML_QUANTISED."""
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    kinds = [GGML_FLOATS.get(row.type_code, GGML_QUANTISED) for row in rows]
    return tuple(
        StoredTensor(row.name, row.shape, kind, math.prod(row.shape) * sizes[kind])
        for row, kind in zip(rows, kinds, strict=True)
    )


def from_safetensors(folder: Path) -> tuple[StoredTensor, ...] | None:
    """Every tensor of the folder's safetensors files; None if there are none. Raises ConvertError for damage."""
    files = _shards(folder)
    return tuple(tensor for file in files for tensor in _read_header(file)) if files else None


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConvertError("not an index of shards (no weight_map): copy the file again", index) from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConvertError(f"{len(missing)} of {len(names)} files are missing: copy {missing[0]} again", index)
    return [folder / name for name in names]


def _read_header(path: Path) -> list[StoredTensor]:
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= size <= MAX_HEADER:
            raise ConvertError(f"header of {size} bytes (2 to {MAX_HEADER} are possible): not safetensors", path, 0)
        raw = file.read(size)
    try:
        header = json.loads(raw)
        return [_tensor(name, row) for name, row in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConvertError("the header is not valid (is the file truncated?)", path, 8) from None


def _tensor(name: str, row: dict[str, Any]) -> StoredTensor:
    begin, end = row["data_offsets"]
    return StoredTensor(name, tuple(row["shape"]), FLOATS.get(row["dtype"]), end - begin)
