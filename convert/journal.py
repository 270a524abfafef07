"""What an interrupted conversion had finished, so that the next one writes only the rest.

Knows nothing of tensors' meaning. A shard is believed if the journal of the same plan lists it and its bytes still
have the hashes in that list; everything else in the folder is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.plan import Target
from convert.source import Source
from convert.source_hashes import source_files

JOURNAL = "journal.jsonl"


class Journal:
    """Lines of JSON in the folder that grows: the plan first, then each finished shard with its tensors' hashes.

    found: one line on what an earlier run had left in the folder, empty if nothing.
    """

    def __init__(self, folder: Path, plan: str) -> None:
        self.path = folder / JOURNAL
        begun = any(folder.iterdir())
        lines = _sound_lines(self.path)
        same = bool(lines) and lines[0] == {"plan": plan}
        self.shards = {str(row["file"]): dict(row["sha256"]) for row in lines[1:]} if same else {}
        self.found = _found(folder, len(self.shards) if same else None) if begun else ""
        _keep_only(folder, {*self.shards, JOURNAL} if same else set())
        if not same:
            self._append({"plan": plan})

    def finished(self, file: str) -> dict[str, str] | None:
        """Tensor -> SHA-256 of a shard that an earlier run finished, None if it did not."""
        return self.shards.get(file)

    def add(self, file: str, hashes: dict[str, str]) -> None:
        """`file` is on the disk, whole."""
        self._append({"file": file, "sha256": hashes})
        self.shards[file] = hashes

    @contextmanager
    def told_when_interrupted(self) -> Iterator[None]:
        """Ctrl-C in the block says what is kept, and how to go on."""
        try:
            yield
        except KeyboardInterrupt:
            kept = f"{_files(len(self.shards))} finished in {self.path.parent}; run the same command again to go on"
            raise KeyboardInterrupt(kept) from None

    def close(self) -> None:
        """The folder is complete: it must not carry the journal."""
        self.path.unlink()

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _found(folder: Path, finished: int | None) -> str:
    """finished: files of the same plan; None for another plan, of which nothing is of use."""
    if finished is not None:
        return f"going on where an interrupted conversion stopped: {_files(finished)} finished"
    other = "another checkpoint, or of this one with other settings or another version"
    return f"beginning anew: {folder} held an interrupted conversion of {other}, now removed"


def _files(count: int) -> str:
    return f"{count} file is" if count == 1 else f"{count} files are"


def _sound_lines(path: Path) -> list[dict[str, Any]]:
    """A kill may have cut the last line, which then does not count; it is cut off, so that the next one starts anew."""
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    os.truncate(path, whole)
    try:
        return [json.loads(line) for line in raw[:whole].splitlines()]
    except ValueError:  # a power cut can leave anything
        return []


def _keep_only(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


def plan_digest(source: Source, targets: Sequence[Target], shard_bytes: int, version: int) -> str:
    """Changes with the plan, and with the name, size or time of any file of the source."""
    states = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in source_files(source)]
    rows = [(t.name, t.dtype, t.shape, t.source.name, t.source.stored, t.transform) for t in targets]
    return hashlib.sha256(json.dumps([version, shard_bytes, states, rows]).encode()).hexdigest()
