"""The header of one GGUF file: metadata and tensor table, checked before anything is believed.

Knows nothing of tensor data, architectures or numpy (`ropeway plan` reads headers and loads none of it).
Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.errors import ConvertError

MAGIC = b"GGUF"
MAX_DIMS = 4
FLOAT32, STRING, ARRAY = 6, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", FLOAT32: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_VALUES = 1 << 23  # of all arrays together: 30 times the largest vocabulary, and still little memory
MOST_TENSORS = 1 << 18
SMALLEST_FIELD = 13  # key length, empty key, type, one byte
SMALLEST_TENSOR = 32  # name length, empty name, dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One row of the tensor table. shape is outermost first; type_code is GGML's (0 F32, 1 F16, 30 BF16, ...).

    offset counts from the start of the data area; at is where the row itself stands in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset: int
    at: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header of `end` bytes. Arrays of strings are lists, arrays of numbers tuples."""

    path: Path
    metadata: dict[str, Any]
    float32_keys: frozenset[str]
    tensors: tuple[TensorRow, ...]
    end: int


class _Cursor:
    """Reads the header front to back; running past the end is an error that names the place."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.values = 0

    def fail(self, text: str, offset: int | None = None) -> ConvertError:
        return ConvertError(text, self.path, self.at if offset is None else offset)

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise self.fail(f"{what} needs {size} bytes, the file has {len(self.data) - self.at} more (truncated?)")

    def numbers(self, count: int, code: str, what: str) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{code}")
        self.need(size, what)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def number(self, code: str, what: str) -> Any:
        return self.numbers(1, code, what)[0]

    def string(self, what: str) -> str:
        start = self.at
        length = self.number("Q", f"length of {what}")
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
        kind, count = self.number("I", key), self.number("Q", key)
        self.values += count
        if self.values > MOST_VALUES:
            raise self.fail(f"{key}: {count} values are more than any model has")
        if kind == STRING:
            return self.strings(count, key)
        if kind not in SCALARS:
            raise self.fail(f"{key}: arrays of type {kind} are not supported")
        return self.numbers(count, SCALARS[kind], key)


def read_header(path: Path) -> GgufHeader:
    """Raises ConvertError with the byte where it stops making sense. The tensors' data need not be there."""
    if path.stat().st_size < 24:
        raise ConvertError("too short for a GGUF header (24 bytes)", path, 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        tensor_count, field_count = _counts(cursor)
        metadata, float32_keys = _metadata(cursor, field_count)
        rows = tuple(_tensor_row(cursor) for _ in range(tensor_count))
        return GgufHeader(path, metadata, float32_keys, rows, cursor.at)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        raise cursor.fail(f"not a GGUF file (starts with {cursor.data[:4]!r})")
    cursor.at = 4
    version = cursor.number("I", "version")
    if version not in (2, 3):
        hint = "big-endian" if version in (2 << 24, 3 << 24) else "only 2 and 3 are read"
        raise cursor.fail(f"GGUF version {version} is not supported ({hint})", 4)
    tensor_count, field_count = cursor.number("Q", "tensor count"), cursor.number("Q", "metadata count")
    room = len(cursor.data) - cursor.at
    if tensor_count > MOST_TENSORS or tensor_count * SMALLEST_TENSOR + field_count * SMALLEST_FIELD > room:
        raise cursor.fail(f"{tensor_count} tensors and {field_count} metadata keys cannot fit in {room} bytes", 8)
    return tensor_count, field_count


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], frozenset[str]]:
    metadata: dict[str, Any] = {}
    float32_keys = set()
    for _ in range(count):
        start = cursor.at
        key = cursor.string("metadata key")
        kind = cursor.number("I", key)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice", start)
        metadata[key] = cursor.value(kind, key)
        if kind == FLOAT32:
            float32_keys.add(key)
    return metadata, frozenset(float32_keys)


def _tensor_row(cursor: _Cursor) -> TensorRow:
    start = cursor.at
    name = cursor.string("tensor name")
    dims = cursor.number("I", name)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions (1 to {MAX_DIMS} are possible)", start)
    shape = cursor.numbers(dims, "Q", name)[::-1]
    return TensorRow(name, shape, cursor.number("I", name), cursor.number("Q", name), start)
