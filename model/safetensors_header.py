"""The header of a safetensors file: which tensors it promises, and where. No weight is read, nothing heavy is imported.

Knows no model and no tensor library. The file itself may be shorter than promised: who reads weights compares sizes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

INDEX = "model.safetensors.index.json"
LONGEST = 100_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


class WeightsError(ValueError):
    """A checkpoint that cannot be loaded: the message names the file and the tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: dtype as safetensors spells it (F32, BF16), offset from the start of the file in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file by name, and how many bytes the whole file must have."""

    entries: dict[str, Entry]
    file_bytes: int


def read_header(path: Path) -> Header:
    """8 bytes of length, JSON, then data ranges that lie end to end. Raises WeightsError for anything else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LONGEST, size - 8):
            raise WeightsError(f"{path.name} is cut short or not safetensors: {size} bytes do not hold its header")
        raw = file.read(length)
    try:
        rows = read_object(raw)
        rows.pop("__metadata__", None)
        entries = {name: _entry(path, name, row, 8 + length) for name, row in rows.items()}
    except ValueError as error:
        raise WeightsError(f"{path.name} has a broken safetensors header: {error}") from None
    return Header(entries, _end(path, entries, 8 + length))


def check_size(path: Path, header: Header) -> None:
    """Raise WeightsError unless the file is as long as promised: a short one that is mapped reads as zeros."""
    size = path.stat().st_size
    if size != header.file_bytes:
        promised = header.file_bytes
        raise WeightsError(f"{path.name} has {size} bytes, its header promises {promised}: copy the file again")


def read_object(raw: bytes | str) -> dict[str, Any]:
    """A JSON object without a key twice. Raises ValueError in words of its own."""
    try:
        value = json.loads(raw, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("not JSON that is sound (nested too deep)") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but a {type(value).__name__}")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different, for json.loads: of two equal ones it would keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _entry(path: Path, name: str, row: Any, base: int) -> Entry:
    said = f"tensor {name[:80]!r}, {str(row)[:80]},"
    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        raise ValueError(f"{said} has no dtype")
    shape, span = row.get("shape"), row.get("data_offsets")
    if not _sizes(shape) or not _sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"{said} needs a shape and two data_offsets, all of them whole numbers from 0 up")
    begin, end = span
    if row["dtype"] in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[row["dtype"]]:
        raise ValueError(f"{said} does not have the bytes of its shape")
    return Entry(path, row["dtype"], tuple(shape), base + begin, end - begin)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(number, int) and number >= 0 for number in value)


def _end(path: Path, entries: dict[str, Entry], base: int) -> int:
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise WeightsError(f"{path.name}: tensor {name} starts at {entry.offset}, the one before ends at {end}")
        end += entry.nbytes
    return end
