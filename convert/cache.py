"""From any checkpoint to a canonical folder, converted at most once: the cache is keyed by content.

Knows nothing of formats. A cached folder is used only if it is whole; a damaged one is made again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from convert.atomic import exclusive
from convert.canonical import is_canonical
from convert.errors import ConvertError
from convert.formats.gguf_parts import part_files
from convert.json_file import read_json
from convert.report import CONVERTER_VERSION, REPORT_FILE

READ_BYTES = 4 << 20


def ensure_canonical(
    path: Path,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    needs_tokenizer: bool = False,
) -> Path:
    """The folder to serve: `path` itself if it is canonical, else its conversion in the cache, made if need be.

    cache_dir: default $ROPEWAY_CACHE, else ~/.cache/ropeway/models. progress gets a line of news, at most one a
    percent. needs_tokenizer: refuse a source without one before it is converted. Raises ConvertError.
    """
    path = Path(path)
    if path.is_dir() and is_canonical(path):
        return path
    if not path.exists():
        raise ConvertError("no such file or folder", path)
    cache = cache_dir or default_cache()
    folder = cache / cache_key(path)
    if is_whole(folder):
        return folder
    from convert.detect import open_source
    from convert.pipeline import convert as run_conversion

    if needs_tokenizer and "tokenizer.json" not in open_source(path).tokenizer_files():
        raise ConvertError("no tokenizer in it: put tokenizer.json or tokenizer.model beside the weights", path)
    make_writable(cache)
    remove_damaged(folder, progress)
    run_conversion(path, folder, progress=_Percent(progress))
    return folder


def cached(path: Path, is_unwanted: Callable[[], bool]) -> Path | None:
    """The conversion of a file in the default cache, if it is there and whole. Loads nothing that converts.

    Raises InterruptedError once it is unwanted: all of a large file is read.
    """
    folder = default_cache() / cache_key(path, is_unwanted)
    return folder if is_whole(folder) else None


def is_whole(folder: Path) -> bool:
    return folder.exists() and damage_of(folder) is None


def remove_damaged(folder: Path, notice: Callable[[str], None]) -> None:
    """Judged again under the lock: what looked damaged may be whole by now, made by another process."""
    with exclusive(folder, notice):
        if folder.exists() and (damage := damage_of(folder)) is not None:
            notice(f"cached conversion {folder} is damaged ({damage}): converting again")
            shutil.rmtree(folder)


def make_writable(cache: Path) -> None:
    """ConvertError, with the setting that helps, if nothing can be kept there."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvertError(
            f"cannot be made ({error.strerror}): set ROPEWAY_CACHE to a folder of yours", cache
        ) from error
    if not os.access(cache, os.W_OK | os.X_OK):
        raise ConvertError("cannot be written: set ROPEWAY_CACHE to a folder that can", cache)


class _Percent:
    """Turns bytes done into a line at every full percent."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.last = tell, ""

    def __call__(self, what: str, done: int, total: int) -> None:
        line = f"{what} {100 * done // total} %" if total else what
        if line != self.last:
            self.tell(line)
        self.last = line


def default_cache() -> Path:
    """$ROPEWAY_CACHE or ~/.cache/ropeway/models."""
    configured = os.environ.get("ROPEWAY_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "ropeway" / "models"


def cache_key(path: Path, is_unwanted: Callable[[], bool] = lambda: False) -> str:
    """Name, size and SHA-256 of the content, and the converter's version: `smollm2-98M0a1b2c3d4e5f6071-v1`."""
    files = part_files(path) if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest, size = hashlib.sha256(), 0
    for file in files:
        if len(files) > 1:
            name = file.name if path.is_file() else file.relative_to(path)
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while piece := stream.read(READ_BYTES):
                if is_unwanted():
                    raise InterruptedError
                digest.update(piece)
                size += len(piece)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    return f"{stem}-{size}-{digest.hexdigest()[:16]}-v{CONVERTER_VERSION}"


def damage_of(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None: the report must be there and every file as long as it says."""
    if not (folder / REPORT_FILE).is_file():
        return f"no {REPORT_FILE}"
    try:
        files = read_json(folder / REPORT_FILE)["files"]
    except (ConvertError, KeyError):
        return f"{REPORT_FILE} is not readable"
    for name, size in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return f"{name} is missing or not {size} bytes long"
    return None
