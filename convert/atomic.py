"""A folder or file that appears whole or not at all, made by one process at a time.

Knows nothing of what is in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from convert.errors import ConvertError

SPARE_BYTES = 64 << 20

Notice = Callable[[str], None]


@contextmanager
def atomic_folder(destination: Path, notice: Notice) -> Iterator[Path | None]:
    """A temporary folder that becomes `destination` when the block ends well and vanishes when it fails.

    One process at a time: a second one waits, then gets None if the first has finished the folder. What a killed (or
    interrupted) run left is still in the temporary folder: the block decides what of it is good.
    """
    temporary = partial_of(destination)
    with exclusive(destination, notice):
        if destination.exists():
            yield None
            return
        temporary.mkdir(exist_ok=True)
        try:
            yield temporary
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(temporary)
        temporary.rename(destination)
        sync_folder(destination.parent)


def partial_of(destination: Path) -> Path:
    """Where `destination` grows until it is whole: beside it, so that the last step is a rename."""
    return destination.parent / f".{destination.name}.partial"


@contextmanager
def exclusive(destination: Path, notice: Notice) -> Iterator[None]:
    """Nobody else makes or removes `destination` meanwhile. The system frees the lock of a process that dies."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    path = destination.parent / f".{destination.name}.lock"
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice("waiting for another process that converts the same checkpoint")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # its last holder removes the file: then this lock guards nothing
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()
    try:
        yield
    finally:
        path.unlink()
        file.close()


def check_free_disk(destination: Path, nbytes: int) -> None:
    """Raises ConvertError when `nbytes` will not fit, with both numbers. What an earlier run left there is ours."""
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    leftovers = partial_of(destination)
    ours = sum(file.stat().st_size for file in leftovers.iterdir()) if leftovers.is_dir() else 0
    free = shutil.disk_usage(parent).free + ours
    if free < nbytes + SPARE_BYTES:
        raise ConvertError(f"needs {nbytes + SPARE_BYTES:,} bytes of disk, {free:,} are free", destination)


def sync_folder(folder: Path) -> None:
    """The names in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
