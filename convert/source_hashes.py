"""SHA-256 of every file of a source and of the stored bytes of every tensor, in one walk over each file.

Knows nothing of formats: each tensor says where its bytes lie. SHA-256 has instructions of its own on today's
processors, and is what `sha256sum` prints for the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.source import Source, SourceTensor

LARGEST_CONFIG = 32 << 20
READ_BYTES = 4 << 20

Row = dict[str, int | str]
"""bytes and sha256."""


@dataclass(frozen=True, slots=True)
class SourceHashes:
    """files: name of each file of the source -> its row. tensors: name of each stored tensor -> its row."""

    files: dict[str, Row]
    tensors: dict[str, Row]


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of one file that belong to a tensor, and its digest. Tensors may share bytes."""

    start: int
    end: int
    digest: Any


def source_files(source: Source) -> list[Path]:
    """The files with tensors, and of a folder the small ones beside them: configs and tokenizers."""
    files = {extent.path for tensor in source.table.values() for extent in tensor.extents}
    if source.path.is_dir():
        beside = [path for path in source.path.iterdir() if path.is_file()]
        files |= {path for path in beside if path.stat().st_size <= LARGEST_CONFIG}
    return sorted(files)


def hash_source(source: Source) -> SourceHashes:
    """Reads every byte once, a few megabytes at a time. Raises ConvertError for a file that is cut meanwhile."""
    digests = {name: hashlib.sha256() for name in source.table}
    files = {}
    for path in source_files(source):
        spans = _spans(path, source.table, digests)
        files[path.name] = _row(path.stat().st_size, _walk(path, spans))
    sizes = {name: sum(extent.nbytes for extent in tensor.extents) for name, tensor in source.table.items()}
    return SourceHashes(files, {name: _row(sizes[name], digest) for name, digest in digests.items()})


def _row(nbytes: int, digest: Any) -> Row:
    return {"bytes": nbytes, "sha256": digest.hexdigest()}


def _spans(path: Path, table: Mapping[str, SourceTensor], digests: Mapping[str, Any]) -> list[_Span]:
    found = [
        _Span(extent.offset, extent.offset + extent.nbytes, digests[name])
        for name, tensor in table.items()
        for extent in tensor.extents
        if extent.path == path and extent.nbytes
    ]
    return sorted(found, key=lambda span: span.start)


def _walk(path: Path, spans: Sequence[_Span]) -> Any:
    """The digest of the whole file; those of the spans are fed on the way."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        for length, over in _stretches(spans, path.stat().st_size):
            left = length
            while left:
                piece = file.read(min(left, READ_BYTES))
                if not piece:
                    raise ConvertError("was cut while it was converted", path, file.tell())
                for digest in (whole, *(span.digest for span in over)):
                    digest.update(piece)
                left -= len(piece)
    return whole


def _stretches(spans: Sequence[_Span], size: int) -> Iterator[tuple[int, list[_Span]]]:
    """The file cut wherever a span starts or ends: bytes of each piece, and the spans that it lies in."""
    cuts = sorted({0, size, *(span.start for span in spans), *(span.end for span in spans)})
    waiting, over = list(reversed(spans)), list[_Span]()
    for start, end in pairwise(cuts):
        over = [span for span in over if span.end > start]
        while waiting and waiting[-1].start == start:
            over.append(waiting.pop())
        yield end - start, over
