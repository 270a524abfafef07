"""Metadata of one GGUF architecture, read by key and checked by type.

Knows nothing of what a key means (gguf_model.py, gguf_rope.py).
"""

from __future__ import annotations

import math
from typing import Any

from convert.dtypes import shortest_float
from convert.errors import ConvertError
from convert.formats.gguf import GgufFile
from convert.source import ConfigEntry


class Fields:
    """Metadata reader that remembers what was asked for, so that the rest can be reported."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch, self.used = file, arch, set[str]()

    def fail(self, key: str, text: str) -> ConvertError:
        """The error about `arch.key`, to be raised."""
        return ConvertError(f"metadata {self.arch}.{key}: {text}", self.file.path)

    def raw(self, key: str) -> Any:
        """The value as stored, or None."""
        self.used.add(f"{self.arch}.{key}")
        return self.file.metadata.get(f"{self.arch}.{key}")

    def get(self, key: str, kind: type = int, default: Any = None) -> ConfigEntry:
        """The value under `arch.key`, or the default; without a default the key is required."""
        name = f"{self.arch}.{key}"
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.fail(key, "missing")
            return ConfigEntry(default, f"default of GGUF ({name} is absent)")
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            number = shortest_float(value) if name in self.file.float32_keys else float(value)
            if not (math.isfinite(number) and number > 0):
                raise self.fail(key, f"must be a positive number, found {number}")
            return ConfigEntry(number, name)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise self.fail(key, f"expected one {kind.__name__}, found {str(value)[:60]!r}")
        if isinstance(value, int) and kind is int and value < 1:
            raise self.fail(key, f"must be positive, found {value}")
        return ConfigEntry(value, name)

    def has(self, key: str) -> bool:
        """Whether the file sets `arch.key` to something: 0 stands for none where a number must be positive."""
        value = self.file.metadata.get(f"{self.arch}.{key}")
        if value is None or value == 0:
            self.used.add(f"{self.arch}.{key}")
        return value is not None and value != 0
