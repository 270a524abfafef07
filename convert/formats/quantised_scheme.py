"""What every scheme of quantised safetensors shares: parts checked against each other, scales spread over a matrix.

Knows nothing of any scheme, of folders, or of names beyond the last word of a tensor's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from convert.dtypes import NUMPY, Float32, to_float32
from convert.errors import ConvertError
from convert.formats.packed_numbers import EXPONENTS, FLOAT8, Integers
from convert.source import SourceTensor

STORED = {"I8": "i1", "U8": "u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "F8_E8M0": "u1"}
STORED |= {name: dtype.str for name, dtype in NUMPY.items()} | dict.fromkeys(FLOAT8, "u1")

Parts = Mapping[str, SourceTensor]


def stored(tensor: SourceTensor) -> Integers:
    """The numbers as they lie in the file; fp8 as its codes."""
    if tensor.dtype not in STORED:
        raise ConvertError(f"tensor {tensor.name!r} is {tensor.dtype}: not supported", tensor.path, tensor.offset)
    count = math.prod(tensor.shape)
    return np.memmap(tensor.path, STORED[tensor.dtype], "r", tensor.offset, (count,)).reshape(tensor.shape)


def numbers(tensor: SourceTensor) -> Float32:
    """Scales and the like as fp32; a NaN or an infinity among them is refused."""
    raw = stored(tensor)
    if tensor.dtype in FLOAT8:
        values = FLOAT8[tensor.dtype][raw]
    else:
        values = EXPONENTS[raw] if tensor.dtype == "F8_E8M0" else to_float32(raw, tensor.dtype)
    if not np.isfinite(values).all():
        raise ConvertError(f"tensor {tensor.name!r} holds NaN or inf", tensor.path, tensor.offset)
    return values


def whole_numbers(tensor: SourceTensor) -> Float32:
    """Zero points as fp32."""
    return stored(tensor).astype(np.float32)


def tile_shape(
    name: str, scale: SourceTensor, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns that one scale holds for. Raises ConvertError if the scales do not cover the matrix."""
    rows, columns = shape
    if math.prod(scale.shape) == 1:
        return rows, columns
    if block is not None and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    if block is None and scale.shape in ((rows,), (rows, 1)):
        return 1, columns
    if block is None and len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        return 1, columns // scale.shape[1]
    text = f"tensor {scale.name!r} has shape {scale.shape}, which does not fit {name} {shape}"
    raise ConvertError(text, scale.path, scale.offset)


def tiled(out: Float32, values: Float32, tile: tuple[int, int], operation: np.ufunc) -> None:
    """out = operation(out, values) in place, each value for its tile; one row of tiles at a time."""
    table = values.reshape(-(-out.shape[0] // tile[0]), -1)
    step = max(tile[0], 1)
    for index, start in enumerate(range(0, out.shape[0], step)):
        row = np.repeat(table[index], tile[1])[: out.shape[1]]
        operation(out[start : start + step], row, out=out[start : start + step])


def check_groups(tensor: SourceTensor, groups: Integers, count: int) -> None:
    if groups.min() < 0 or groups.max() >= count:
        raise ConvertError(f"tensor {tensor.name!r} names a group outside {count}", tensor.path, tensor.offset)


@dataclass(frozen=True)
class Scheme(ABC):
    """values: the last word of the tensor that holds the quantised numbers; others: those that may belong to it."""

    path: Path
    said: Mapping[str, Any]
    values: ClassVar[str]
    others: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[frozenset[str]]

    @abstractmethod
    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        """[out, in], once the shapes of the parts have been checked. Raises ConvertError."""

    @abstractmethod
    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        """The weight."""

    def weight(self, name: str, parts: Parts) -> SourceTensor:
        """The tensor that takes the place of its parts."""
        main = parts[self.values]
        shape = self.shape(name, parts)
        what = f"{self.said['quant_method']} {main.dtype}"
        names = tuple(part.name for part in parts.values())
        read = lambda: self.read(parts, shape)  # noqa: E731
        return SourceTensor(name, shape, what, "F32", main.path, main.offset, read, names)

    def need(self, name: str, parts: Parts, *leaves: str) -> None:
        """ConvertError unless these parts are there."""
        for leaf in leaves:
            if leaf not in parts:
                main = parts[self.values]
                raise ConvertError(f"{name} is quantised, but has no {leaf}", main.path, main.offset)

    def fits(self, name: str, part: SourceTensor, shape: tuple[int, ...]) -> None:
        """ConvertError unless `part` has this shape."""
        if part.shape != shape:
            text = f"tensor {part.name!r} has shape {part.shape}, {name} needs {shape}"
            raise ConvertError(text, part.path, part.offset)

    def setting(self, key: str, *accepted: Any) -> Any:
        """said[key], None if it is absent; refused unless it is one of those."""
        value = self.said.get(key)
        if not any(value == choice and type(value) is type(choice) for choice in accepted):
            known = " or ".join(repr(choice) for choice in accepted)
            method = self.said["quant_method"]
            raise ConvertError(f"{method}: {key} is {str(value)[:60]}, supported is {known}", self.path)
        return value
