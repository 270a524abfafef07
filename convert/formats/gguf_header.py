"""The header of a GGUF file in milliseconds: scalar metadata, short number arrays and the tensor table.

Knows nothing of tensor data, vocabularies or numpy: string arrays are stepped over (gguf.py reads and checks it all).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from convert.errors import ConvertError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
LENGTH = struct.Struct("<Q")
LONGEST_ARRAY = 4096
"""Arrays of more numbers are stepped over: per-layer settings are short, vocabularies are not."""

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One row of the tensor table. shape is outermost first; type_code is GGML's (0 F32, 1 F16, 30 BF16, ...)."""

    name: str
    shape: tuple[int, ...]
    type_code: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata holds what was read: scalars, strings and arrays of at most LONGEST_ARRAY numbers."""

    metadata: dict[str, Scalar | tuple[Scalar, ...]]
    tensors: tuple[TensorRow, ...]


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, text: str) -> ConvertError:
        return ConvertError(text, self.path, self.at)

    def take(self, code: str) -> Scalar:
        try:
            (value,) = struct.unpack_from(code, self.data, self.at)
        except struct.error:
            raise self.fail("the header ends here (is the file truncated?)") from None
        self.at += struct.calcsize(code)
        scalar: Scalar = value
        return scalar

    def count(self) -> int:
        return int(self.take("<Q"))

    def string(self) -> str:
        length = self.count()
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise self.fail(f"a string of {length} bytes runs past the end of the file (is it truncated?)")
        self.at += length
        return raw.decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands: one addition each, no string is made."""
        data, at, unpack = self.data, self.at, LENGTH.unpack_from
        try:
            for _ in range(count):
                at += LENGTH.size + unpack(data, at)[0]
        except (struct.error, OverflowError):
            raise self.fail(f"an array of {count} strings runs past the end of the file (is it truncated?)") from None
        self.at = at

    def array(self) -> tuple[Scalar, ...] | None:
        kind, count = int(self.take("<I")), self.count()
        if kind == STRING:
            self.skip_strings(count)
            return None
        code = self.scalar_code(kind)
        if count > LONGEST_ARRAY:
            self.at += count * struct.calcsize(code)
            return None
        return tuple(self.take(code) for _ in range(count))

    def scalar_code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.fail(f"unknown metadata type {kind} (0 to 12 are known)")
        return SCALARS[kind]

    def value(self) -> Scalar | tuple[Scalar, ...] | None:
        kind = int(self.take("<I"))
        if kind == STRING:
            return self.string()
        return self.array() if kind == ARRAY else self.take(self.scalar_code(kind))

    def tensor(self) -> TensorRow:
        name = self.string()
        dims = int(self.take("<I"))
        if not 1 <= dims <= 4:
            raise self.fail(f"tensor {name!r} has {dims} dimensions (1 to 4 are possible)")
        shape = tuple(self.count() for _ in range(dims))[::-1]
        type_code = int(self.take("<I"))
        self.take("<Q")  # where the data starts
        return TensorRow(name, shape, type_code)


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensor table of `path`, all parts of a split file together.

    Raises ConvertError (file, byte, reason) for what is not GGUF version 2 or 3, ends early or lacks a part.
    """
    header = _read_one(path)
    parts = int(str(header.metadata.get("split.count", 1)))
    if parts <= 1:
        return header
    rest = [_read_one(part) for part in _part_paths(path, parts) if part != path]
    return GgufHeader(header.metadata, header.tensors + tuple(row for part in rest for row in part.tensors))


def _part_paths(path: Path, parts: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match or int(match[2]) != parts:
        raise ConvertError(f"one of {parts} parts, but its name does not end in -00001-of-{parts:05}.gguf", path)
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, parts + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ConvertError(f"{len(missing)} of {parts} parts are missing: put {missing[0]} beside it", path)
    return paths


def _read_one(path: Path) -> GgufHeader:
    if path.stat().st_size < 24:
        raise ConvertError("too short for a GGUF header (24 bytes)", path, 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        tensor_count, field_count = _counts(cursor)
        metadata = {}
        for _ in range(field_count):
            key, value = cursor.string(), cursor.value()
            if value is not None:
                metadata[key] = value
        return GgufHeader(metadata, tuple(cursor.tensor() for _ in range(tensor_count)))


def _counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        raise cursor.fail(f"not a GGUF file (it starts with {cursor.data[:4]!r})")
    cursor.at = 4
    version = cursor.take("<I")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} (2 and 3 are read, little-endian)")
    return cursor.count(), cursor.count()
