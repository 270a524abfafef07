"""A checkpoint before conversion: its config with the origin of every key, its tensors (read lazily), its tokenizer.

Knows nothing of any format or of how a path is recognised (detect.py): every reader makes one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.dtypes import NUMPY, Array
from convert.errors import ConvertError
from convert.rope_pairing import Pairing


class Extent(NamedTuple):
    """A run of bytes in a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One stored tensor. stored is the format's own type (Q4_1), dtype what `read` returns (F32, F16, BF16).

    extents: where its bytes lie, as stored; at most one in a file, in the order of the files.
    parts and how: the stored tensors that it is cut out of or put together from, and what was done; () as it stands.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    dtype: str
    path: Path
    offset: int
    read: Callable[[], Array]
    parts: tuple[str, ...] = ()
    how: str = ""
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A value of config.json and the key, tensor or rule that it came from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint. names maps each source tensor to its Hugging Face name, derived the Hugging Face names of
    tensors that the source stores otherwise to how to get them; a stored tensor that is in neither of them, nor in
    dropped, is not understood. unused: metadata that does not enter the result, each with the reason.
    raw: what an independent reader of this format needs (header fields under their own names).
    """

    path: Path
    format: str
    architecture: str
    pairing: Pairing
    config: dict[str, ConfigEntry]
    names: dict[str, str]
    table: dict[str, SourceTensor]
    raw: Mapping[str, Any]
    derived: Mapping[str, SourceTensor] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    tokenizer_files: Callable[[], dict[str, str]] = dict

    def tensors(self) -> Iterator[SourceTensor]:
        """Every stored tensor, in the order of the file."""
        yield from self.table.values()

    def values(self) -> dict[str, Any]:
        """config.json without the origins."""
        return {key: entry.value for key, entry in self.config.items()}


def file_tensor(name: str, path: Path, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> SourceTensor:
    """A tensor that lies in `path` at byte `offset` exactly as numpy would lay it out, mapped when it is read."""

    def read() -> Array:
        if dtype not in NUMPY:
            raise ConvertError(f"tensor {name!r} is {dtype}, which is not supported", path, offset)
        return np.memmap(path, NUMPY[dtype], "r", offset, (math.prod(shape),)).reshape(shape)

    return SourceTensor(name, shape, dtype, dtype, path, offset, read, extents=(Extent(path, offset, nbytes),))
