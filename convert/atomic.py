"""A folder or file that appears whole or not at all, made by one process at a time.

Knows nothing of what is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from convert.errors import ConvertError

Notice = Callable[[str], None]


@contextmanager
def atomic_folder(destination: Path, nbytes: int, notice: Notice) -> Iterator[Path | None]:
    """A temporary folder that becomes `destination` when the block ends well and vanishes when it fails.

    One process at a time: a second one waits, then gets None if the first has finished the folder. What a killed (or
    interrupted) run left is still in the temporary folder: the block decides what of it is good. nbytes: what it will
    hold at the least.
    """
    temporary = partial_of(destination)
    with exclusive(destination, notice):
        if destination.exists():
            yield None
            return
        check_free_disk(destination, nbytes)
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
    """Nobody else makes or removes `destination` meanwhile. The system frees the lock of a process that dies.

    Folders above it are made, and removed again if nothing comes to lie in them. Raises ConvertError for a place that
    cannot be written or runs full.
    """
    missing = [folder for folder in destination.parents if not folder.exists()]
    with _blaming(destination):
        try:
            with _locked(destination.parent / f".{destination.name}.lock", destination, notice):
                yield
        finally:
            with suppress(OSError):  # something lies there
                for folder in missing:
                    folder.rmdir()


@contextmanager
def _blaming(destination: Path) -> Iterator[None]:
    """An OSError of what is made for the destination, or of a full disk, as one line that names the destination."""
    try:
        yield
    except OSError as error:
        if not _is_ours(error, destination.absolute()):
            raise
        what = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConvertError(
            f"cannot be made there, nothing is left ({what}): name another place", destination
        ) from error


def _is_ours(error: OSError, destination: Path) -> bool:
    """Of the lock, what grows beside the destination, or a folder above it; without a name, what only writes meet."""
    name = error.filename2 or error.filename
    if name is None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    path = Path(name).absolute()
    beside = (f".{destination.name}.lock", partial_of(destination).name)
    return any(part in beside for part in path.parts) or destination.is_relative_to(path)


@contextmanager
def _locked(path: Path, destination: Path, notice: Notice) -> Iterator[None]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # each time: who fails removes the folders that it made
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice(f"waiting for another process that makes {destination}")
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
    leftovers = partial_of(destination)
    ours = sum(file.stat().st_size for file in leftovers.iterdir()) if leftovers.is_dir() else 0
    free = shutil.disk_usage(destination.parent).free + ours
    if free < nbytes:
        raise ConvertError(f"needs {nbytes:,} bytes of disk, {free:,} are free: name another disk", destination)


def sync_folder(folder: Path) -> None:
    """The names in `folder` are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
