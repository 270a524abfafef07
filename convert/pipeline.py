"""One conversion from opening the source to the finished folder: plan, check, write, prove, report, rename.

Knows nothing of the command line or of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.atomic import atomic_folder
from convert.detect import open_source
from convert.dtypes import TORCH_NAMES
from convert.journal import Journal, plan_digest
from convert.plan import Target, make_plan
from convert.report import CONVERTER_VERSION, REPORT_FILE, hash_texts, is_lossless, make_report
from convert.source import Source
from convert.source_hashes import hash_source
from convert.tokenizer.assemble import to_json
from convert.verify import FORWARDS, Proof, prove, require
from convert.write import SHARD_BYTES, write_tensors, write_text

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): bytes while writing, layers while proving, 0 of 0 for a notice."""


def silent(what: str, done: int, total: int) -> None:
    """The progress of who does not look."""


def convert(
    path: Path,
    destination: Path,
    dtype: str | None = None,
    progress: Progress = silent,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any] | None:
    """Convert `path` to a canonical folder `destination`; returns the report, None if the folder was there already.

    dtype: F32, F16 or BF16 for every tensor; None keeps each as stored (quantised ones become F32, which is exact).
    Raises ConvertError, and OSError for a full or failing disk; either way nothing is left at `destination`. A run that
    was killed leaves its finished shards (of at most shard_bytes) beside it, and the next one goes on from there.
    """
    source = open_source(path)
    targets = make_plan(source, dtype)
    nbytes = sum(target.nbytes for target in targets)
    with atomic_folder(destination, nbytes, lambda text: progress(text, 0, 0)) as folder:
        if folder is None:
            return None
        journal = Journal(folder, plan_digest(source, targets, shard_bytes, CONVERTER_VERSION))
        if journal.found:
            progress(journal.found, 0, 0)
        with journal.told_when_interrupted():
            return _fill(folder, source, targets, progress, journal, shard_bytes)


def _fill(
    folder: Path, source: Source, targets: list[Target], progress: Progress, journal: Journal, shard_bytes: int
) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    with _timed(seconds, "tokenizer and config"):
        for name, text in source.tokenizer_files().items():
            write_text(folder / name, text)
        config = source.values() | {"dtype": _main_dtype(targets), "torch_dtype": _main_dtype(targets)}
        write_text(folder / "config.json", to_json(config))
    with _timed(seconds, "weights"):
        hashes = _write(folder, targets, progress, journal, shard_bytes)
    with _timed(seconds, "proof"):
        proof = _prove(folder, source, targets, progress)
    require(proof, source.path)
    with _timed(seconds, "hashes of the source"):
        source_hashes = hash_source(source)
    journal.close()
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    report = make_report(source, targets, hashes, files, hash_texts(folder), proof.as_json(), seconds, source_hashes)
    write_text(folder / REPORT_FILE, to_json(report))
    return report


def _write(
    folder: Path, targets: list[Target], progress: Progress, journal: Journal, shard_bytes: int
) -> dict[str, str]:
    hashes: dict[str, str] = {}
    done, total = 0, sum(target.nbytes for target in targets)

    def on_tensor(target: Target, digest: str) -> None:
        nonlocal done
        hashes[target.name] = digest
        done += target.nbytes
        progress("writing", done, total)

    write_tensors(targets, folder, on_tensor, journal, shard_bytes)
    return hashes


def _prove(folder: Path, source: Source, targets: list[Target], progress: Progress) -> Proof:
    done, total = 0, FORWARDS * source.values()["num_hidden_layers"]

    def on_layer() -> None:
        nonlocal done
        done += 1
        progress("proving", done, total)

    progress("proving", 0, total)  # the embedding comes before the first layer, and is the largest of all
    proof = prove(folder, source, is_lossless(targets), on_layer)
    progress("proving", total, total)
    return proof


def _main_dtype(targets: list[Target]) -> str:
    """The type that holds most bytes, in torch's spelling."""
    sizes: dict[str, int] = {}
    for target in targets:
        sizes[target.dtype] = sizes.get(target.dtype, 0) + target.nbytes
    return TORCH_NAMES[max(sizes, key=lambda dtype: sizes[dtype])]


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
