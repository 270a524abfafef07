"""GGUF models split over several files: the parts are found by their names and must fit together.

Knows nothing of architectures or tensor data. Only the first part carries the metadata.
"""

from __future__ import annotations

import re
from pathlib import Path

from convert.errors import ConvertError
from convert.formats.gguf_header import GgufHeader, read_header

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
            raise ConvertError(f"part {part.name} of the model is missing: put it beside this one", path)
    return parts


def read_headers(path: Path) -> list[GgufHeader]:
    """The header of every part, in order; a model in one file has one. No tensor name is there twice."""
    headers = [read_header(part) for part in part_files(path)]
    metadata = headers[0].metadata
    count = metadata.get("split.count", 1)
    if count != len(headers):
        raise ConvertError(f"is one of {count} parts, which must keep their names (-00001-of-{count:05}.gguf)", path)
    names: set[str] = set()
    for index, header in enumerate(headers):
        if len(headers) > 1 and header.metadata.get("split.no") != index:
            raise ConvertError(f"split.no is {header.metadata.get('split.no')!r}, expected {index}", header.path)
        for row in header.tensors:
            if row.name in names:
                raise ConvertError(f"tensor {row.name!r} appears twice", header.path, row.at)
            names.add(row.name)
    total = metadata.get("split.tensors.count", len(names))
    if total != len(names):
        raise ConvertError(f"the parts hold {len(names)} tensors, split.tensors.count says {total}", path)
    return headers
