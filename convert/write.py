"""Safetensors written one tensor at a time, in shards of which finished ones are not written again.

Knows nothing of sources: targets in, files and hashes out. Memory: the tensor being written and the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convert.dtypes import NUMPY, raw_bytes
from convert.journal import Journal
from convert.plan import Target

SHARD_BYTES = 5_000_000_000
FLUSH_BYTES = 64 << 20  # start the disk early: fsync at the end would wait for everything
READ_BYTES = 4 << 20

OnTensor = Callable[[Target, str], None]


def write_tensors(
    targets: Sequence[Target], folder: Path, on_tensor: OnTensor, journal: Journal, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write model.safetensors, or shards with an index; on_tensor(target, sha256) after each. Returns file names."""
    shards = _shards(targets, shard_bytes)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _finish(folder / name, shard, on_tensor, journal)
    if len(shards) > 1:
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(target.nbytes for target in targets)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return names


def _shards(targets: Sequence[Target], shard_bytes: int) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if shards[-1] and size + target.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.nbytes
    return shards


def _finish(path: Path, targets: Sequence[Target], on_tensor: OnTensor, journal: Journal) -> None:
    hashes = journal.finished(path.name)
    if hashes is not None and _holds(path, targets, hashes):
        for target in targets:
            on_tensor(target, hashes[target.name])
        return
    written: dict[str, str] = {}

    def on_written(target: Target, digest: str) -> None:
        written[target.name] = digest
        on_tensor(target, digest)

    write_safetensors(path, targets, on_written)
    journal.add(path.name, written)


def _holds(path: Path, targets: Sequence[Target], hashes: dict[str, str]) -> bool:
    """Whether the shard on the disk is what was written, to the last byte."""
    ordered = _ordered(targets)
    header = _header(ordered)
    if not path.is_file() or path.stat().st_size != len(header) + sum(target.nbytes for target in ordered):
        return False
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            return False
        for target in ordered:
            digest, left = hashlib.sha256(), target.nbytes
            while left:
                piece = file.read(min(left, READ_BYTES))
                digest.update(piece)
                left -= len(piece)
            if digest.hexdigest() != hashes.get(target.name):
                return False
    return True


def write_safetensors(path: Path, targets: Sequence[Target], on_tensor: OnTensor) -> None:
    """Header first (shapes are known), then data; the next tensor is prepared while this one is written."""
    ordered = _ordered(targets)
    with path.open("wb") as file, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as flusher:
        file.write(_header(ordered))
        pending = reader.submit(ordered[0].read)
        unflushed, flush = 0, None
        for position, target in enumerate(ordered):
            data = raw_bytes(pending.result())
            if position + 1 < len(ordered):
                pending = reader.submit(ordered[position + 1].read)
            assert len(data) == target.nbytes, target.name
            digest = hashlib.sha256(data).hexdigest()
            file.write(data)
            on_tensor(target, digest)
            unflushed += len(data)
            if unflushed > FLUSH_BYTES and (flush is None or flush.done()):
                file.flush()
                unflushed, flush = 0, flusher.submit(os.fdatasync, file.fileno())
        file.flush()
        os.fsync(file.fileno())


def _ordered(targets: Sequence[Target]) -> list[Target]:
    """Wide types first, which keeps data aligned; else as they come."""
    return sorted(targets, key=lambda target: -NUMPY[target.dtype].itemsize)


def _header(targets: Sequence[Target]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for target in targets:
        entries[target.name] = {
            "dtype": target.dtype,
            "shape": list(target.shape),
            "data_offsets": [at, at + target.nbytes],
        }
        at += target.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, on the disk before this returns. Half a surrogate pair, which JSON may hold, becomes its escape."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
