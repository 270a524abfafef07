"""GGUF models split over several files: the parts are found by their names and must fit together.

Knows nothing of architectures. Only the first part carries the metadata.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from convert.errors import ConvertError
from convert.formats.gguf import GgufFile, GgufTensor, read_gguf

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_files(path: Path) -> list[Path]:
    """Every file of the model that `path` belongs to, in order; one that is missing is a ConvertError."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ConvertError(f"part {part.name} of the model is missing", path)
    return parts


def read_parts(path: Path) -> GgufFile:
    """One file with the metadata of the first part and the tensors of all of them."""
    parts = [read_gguf(part) for part in part_files(path)]
    first = parts[0]
    count = first.metadata.get("split.count", 1)
    if count != len(parts):
        raise ConvertError(f"is one of {count} parts, which must keep their names (-00001-of-{count:05}.gguf)", path)
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(parts):
        if len(parts) > 1 and part.metadata.get("split.no") != index:
            raise ConvertError(f"split.no is {part.metadata.get('split.no')!r}, expected {index}", part.path)
        if twice := part.tensors.keys() & tensors.keys():
            raise ConvertError(f"tensor {sorted(twice)[0]!r} is in two parts", part.path)
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ConvertError(f"the parts hold {len(tensors)} tensors, split.tensors.count says {total}", path)
    return replace(first, tensors=tensors)
