"""Safetensors written one tensor at a time, and a folder that appears whole or not at all.

Knows nothing of sources: targets in, files and hashes out. Memory: the tensor being written and the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from convert.dtypes import NUMPY, raw_bytes
from convert.errors import ConvertError
from convert.plan import Target

SHARD_BYTES = 5_000_000_000
FLUSH_BYTES = 64 << 20  # start the disk early: fsync at the end would wait for everything
SPARE_BYTES = 64 << 20

OnTensor = Callable[[Target, str], None]


def write_tensors(targets: Sequence[Target], folder: Path, on_tensor: OnTensor) -> list[str]:
    """Write model.safetensors, or shards with an index; on_tensor(target, sha256) after each. Returns file names."""
    shards = _shards(targets)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, on_tensor)
    if len(shards) > 1:
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(target.nbytes for target in targets)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return names


def _shards(targets: Sequence[Target]) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if shards[-1] and size + target.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.nbytes
    return shards


def write_safetensors(path: Path, targets: Sequence[Target], on_tensor: OnTensor) -> None:
    """Header first (shapes are known), then data; the next tensor is prepared while this one is written."""
    ordered = sorted(targets, key=lambda t: -NUMPY[t.dtype].itemsize)  # stable: wide types first keeps data aligned
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
    """UTF-8 text, on the disk before this returns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_free_disk(folder: Path, nbytes: int) -> None:
    """Raises ConvertError when `nbytes` will not fit, with both numbers."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise ConvertError(f"needs {nbytes + SPARE_BYTES:,} bytes of disk, {free:,} are free", folder)


@contextmanager
def atomic_folder(destination: Path, notice: Callable[[str], None]) -> Iterator[Path | None]:
    """A temporary folder that becomes `destination` when the block ends well and vanishes when it does not.

    One process at a time: a second one waits, then gets None if the first has finished the folder. What a killed run
    left behind is removed.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f".{destination.name}.partial"
    with _lock(destination.parent / f".{destination.name}.lock", notice):
        if destination.exists():
            yield None
            return
        if temporary.exists():
            notice(f"removing {temporary}, left by a conversion that was interrupted")
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            yield temporary
            _sync_folder(temporary)
            temporary.rename(destination)
            _sync_folder(destination.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(path: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """Exclusive between processes, freed by the system when one dies. The file is removed by its last holder."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice("waiting for another process that converts the same checkpoint")
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()
    try:
        yield
    finally:
        path.unlink()
        file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
