"""A checkpoint before conversion: its config with the origin of every key, its tensors (read lazily), its tokenizer.

Knows nothing of any format: `open_source` asks each reader whether it recognises the content, never the file name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.rope_pairing import Pairing


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One stored tensor. stored is the format's own type (Q4_1), dtype what `read` returns (F32, F16, BF16)."""

    name: str
    shape: tuple[int, ...]
    stored: str
    dtype: str
    path: Path
    offset: int
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A value of config.json and the key, tensor or rule that it came from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint. names maps each source tensor to its Hugging Face name; what is in neither names nor
    dropped is not understood. unused: metadata that does not enter the result, each with the reason.
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
    dropped: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    tokenizer_files: Callable[[], dict[str, str]] = dict
    canonical: bool = False

    def tensors(self) -> Iterator[SourceTensor]:
        """Every stored tensor, in the order of the file."""
        yield from self.table.values()

    def values(self) -> dict[str, Any]:
        """config.json without the origins."""
        return {key: entry.value for key, entry in self.config.items()}


def open_source(path: Path) -> Source:
    """Recognise `path` (a file or a folder) by its content. Raises ConvertError when no reader knows it."""
    from convert.formats.gguf import MAGIC
    from convert.formats.gguf_model import open_gguf
    from convert.formats.huggingface import is_huggingface, open_huggingface

    if not path.exists():
        raise ConvertError("no such file or folder", path)
    if path.is_dir():
        if is_huggingface(path):
            return open_huggingface(path)
        raise ConvertError("no checkpoint in this folder (expected config.json and *.safetensors)", path)
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] == MAGIC:
        return open_gguf(path)
    raise ConvertError(f"not a checkpoint of a known format (starts with {start!r})", path, 0)
