"""The GGUF container: metadata and tensor table, checked before anything is believed.

Knows nothing of architectures or of what the tensors are for (see gguf_model.py).
Versions 2 and 3, little-endian. Nothing is copied: tensors are views of the mapped file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.formats.gguf_quants import BLOCKS, REFUSED_TYPES, TYPE_NAMES

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}
SMALLEST_FIELD = 13  # key length, empty key, type, one byte
SMALLEST_TENSOR = 32  # name length, empty name, dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. shape is numpy's order (outermost first), offset is absolute in the file."""

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
    """A parsed file. Integer and float arrays of the metadata are numpy, strings a list."""

    path: Path
    metadata: dict[str, Any]
    float32_keys: frozenset[str]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads the header front to back; running past the end is an error that names the place."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, text: str, offset: int | None = None) -> ConvertError:
        return ConvertError(text, self.path, self.at if offset is None else offset)

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise self.fail(f"{what} needs {size} bytes, the file has {len(self.data) - self.at} more (truncated?)")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, what)
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        start = self.at
        length = self.number("<Q", f"length of {what}")
        self.need(length, what)
        try:
            text = self.data[self.at : self.at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", start) from error
        self.at += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """Vocabularies hold hundreds of thousands: the common path avoids a call per string."""
        self.need(8 * count, what)
        data, at, end = self.data, self.at, len(self.data)
        out: list[str] = []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > end or begin > end:
                raise self.fail(f"{what}: string {len(out)} runs past the end of the file", begin - 8)
            try:
                out.append(data[begin:at].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self.fail(f"{what}: string {len(out)} is not UTF-8", begin - 8) from error
        self.at = at
        return out

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.fail(f"{key}: unknown value type {kind}")
        return self.number(SCALARS[kind], key)

    def array(self, key: str) -> Any:
        kind, count = self.number("<I", key), self.number("<Q", key)
        if kind == STRING:
            return self.strings(count, key)
        if kind not in SCALARS:
            raise self.fail(f"{key}: arrays of type {kind} are not supported")
        dtype = np.dtype(SCALARS[kind])
        self.need(count * dtype.itemsize, key)
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += count * dtype.itemsize
        return values


def read_gguf(path: Path) -> GgufFile:
    """Parse and check the header of `path`. Raises ConvertError with the byte where it stops making sense."""
    if path.stat().st_size < 24:
        raise ConvertError("too short for a GGUF header (24 bytes)", path, 0)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    tensor_count, field_count = _counts(cursor)
    metadata, float32_keys = _metadata(cursor, field_count)
    rows = [_tensor_row(cursor) for _ in range(tensor_count)]
    tensors = _place(cursor, rows, _alignment(cursor, metadata))
    return GgufFile(path, metadata, float32_keys, tensors)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        raise cursor.fail(f"not a GGUF file (starts with {cursor.data[:4]!r})")
    cursor.at = 4
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        hint = "big-endian" if version in (2 << 24, 3 << 24) else "only 2 and 3 are read"
        raise cursor.fail(f"GGUF version {version} is not supported ({hint})", 4)
    tensor_count, field_count = cursor.number("<Q", "tensor count"), cursor.number("<Q", "metadata count")
    room = len(cursor.data) - cursor.at
    if tensor_count * SMALLEST_TENSOR + field_count * SMALLEST_FIELD > room:
        raise cursor.fail(f"{tensor_count} tensors and {field_count} metadata keys cannot fit in {room} bytes", 8)
    return tensor_count, field_count


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], frozenset[str]]:
    metadata: dict[str, Any] = {}
    float32_keys = set()
    for _ in range(count):
        start = cursor.at
        key = cursor.string("metadata key")
        kind = cursor.number("<I", key)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice", start)
        metadata[key] = cursor.value(kind, key)
        if kind == 6:
            float32_keys.add(key)
    return metadata, frozenset(float32_keys)


def _tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    """name, shape, type, offset relative to the data area, and where the row stands in the file."""
    start = cursor.at
    name = cursor.string("tensor name")
    dims = cursor.number("<I", name)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions (1 to {MAX_DIMS} are possible)", start)
    shape = tuple(int(cursor.number("<Q", name)) for _ in range(dims))[::-1]
    code, offset = cursor.number("<I", name), cursor.number("<Q", name)
    kind = TYPE_NAMES.get(code)
    if kind is None:
        known = REFUSED_TYPES.get(code)
        what = f"quantisation {known} is not supported" if known else f"unknown tensor type {code}"
        raise cursor.fail(f"tensor {name!r}: {what}", start)
    if 0 in shape or shape[-1] % BLOCKS[kind][0]:
        raise cursor.fail(f"tensor {name!r}: shape {shape} does not divide into {kind} blocks", start)
    return name, shape, kind, offset, start


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two from 8 up")
    return alignment


def _place(
    cursor: _Cursor, rows: list[tuple[str, tuple[int, ...], str, int, int]], alignment: int
) -> dict[str, GgufTensor]:
    """Absolute offsets; every tensor inside the file, aligned, none over another, no name twice."""
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset, row in rows:
        block, block_bytes = BLOCKS[kind]
        count = 1
        for dim in shape:
            count *= dim
        nbytes = count // block * block_bytes
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice", row)
        if offset % alignment or base + offset + nbytes > len(cursor.data):
            reason = f"not a multiple of {alignment}" if offset % alignment else "past the end of the file (truncated?)"
            raise cursor.fail(f"tensor {name!r}: {nbytes} bytes at data offset {offset}: {reason}", row)
        tensors[name] = GgufTensor(name, shape, kind, base + offset, nbytes, cursor.path, cursor.data)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise cursor.fail(f"tensors {last!r} and {tensor.name!r} overlap", tensor.offset)
        end, last = tensor.offset + tensor.nbytes, tensor.name
    return tensors
