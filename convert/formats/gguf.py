"""The tensors of a GGUF model: where each lies, checked against its file, and its bytes as views of the mapped file.

Knows nothing of how a header is read (gguf_header.py), of architectures or of what the tensors are for (gguf_model.py).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.formats.gguf_header import GgufHeader, TensorRow
from convert.formats.gguf_parts import read_headers
from convert.formats.gguf_quants import BLOCKS, REFUSED_TYPES, TYPE_NAMES

DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape is numpy's order (outermost first), offset is absolute in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    path: Path
    data: mmap.mmap

    def blocks(self) -> Array:
        """The stored bytes, uint8 [blocks, bytes of a block], as a view."""
        flat = np.frombuffer(self.data, np.uint8, self.nbytes, self.offset)
        return flat.reshape(-1, BLOCKS[self.type][1])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model: the metadata of its first part and the tensors of all of them."""

    path: Path
    metadata: dict[str, Any]
    float32_keys: frozenset[str]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The model that `path` belongs to, checked. Raises ConvertError with the byte where it stops making sense."""
    headers = read_headers(path)
    tensors = {tensor.name: tensor for header in headers for tensor in _place(header)}
    return GgufFile(headers[0].path, headers[0].metadata, headers[0].float32_keys, tensors)


def _place(header: GgufHeader) -> list[GgufTensor]:
    """Absolute offsets; every tensor inside the file, aligned, none over another."""
    alignment = _alignment(header)
    base = -(-header.end // alignment) * alignment
    with header.path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = []
    for row in header.tensors:
        kind = _stored_type(header.path, row)
        block, block_bytes = BLOCKS[kind]
        nbytes = math.prod(row.shape) // block * block_bytes
        if row.offset % alignment or base + row.offset + nbytes > len(data):
            aligned = not row.offset % alignment
            reason = "past the end of the file (truncated?)" if aligned else f"not a multiple of {alignment}"
            text = f"tensor {row.name!r}: {nbytes} bytes at data offset {row.offset}: {reason}"
            raise ConvertError(text, header.path, row.at)
        tensors.append(GgufTensor(row.name, row.shape, kind, base + row.offset, nbytes, header.path, data))
    _check_overlaps(tensors)
    return tensors


def _stored_type(path: Path, row: TensorRow) -> str:
    kind = TYPE_NAMES.get(row.type_code)
    if kind is None:
        known = REFUSED_TYPES.get(row.type_code)
        what = f"quantisation {known} is not supported" if known else f"unknown tensor type {row.type_code}"
        raise ConvertError(f"tensor {row.name!r}: {what}", path, row.at)
    if 0 in row.shape or row.shape[-1] % BLOCKS[kind][0]:
        text = f"tensor {row.name!r}: shape {row.shape} does not divide into {kind} blocks"
        raise ConvertError(text, path, row.at)
    return kind


def _alignment(header: GgufHeader) -> int:
    alignment = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ConvertError(f"general.alignment is {alignment!r}, not a power of two from 8 up", header.path, header.end)
    return alignment


def _check_overlaps(tensors: list[GgufTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            raise ConvertError(f"tensors {last!r} and {tensor.name!r} overlap", tensor.path, tensor.offset)
        end, last = tensor.offset + tensor.nbytes, tensor.name
