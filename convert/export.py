"""The way back: a checkpoint to Meta's, GGUF's or llama2.c's own files, where that loses nothing.

Knows nothing of bytes on disk (each format's writer does). What has been written is opened again: every tensor must
read back with the same values, rotary frequencies must be the same, and logits must agree, but for the order of
additions; where a narrower type was asked for, as closely as verify.py asks of rounded values (mean KL divergence).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from convert.atomic import Notice, check_free_disk, exclusive, partial_of
from convert.detect import open_source
from convert.dtypes import to_float32
from convert.errors import ConvertError
from convert.formats.gguf_model import gguf_name
from convert.formats.gguf_write import write_gguf
from convert.formats.llama2c_write import write_llama2c
from convert.formats.meta_names import meta_name
from convert.formats.meta_write import copy_tokenizer, write_meta
from convert.formats.mistral_write import write_mistral
from convert.plan import Target, make_plan, rope_heads
from convert.positions import compare_rotation, compare_windows
from convert.readings import source_reading
from convert.report import is_lossless
from convert.rope_pairing import to_adjacent
from convert.source import Source
from convert.verify import LogitComparison, compare

FILES = ("gguf", "llama2c")  # the others are folders
EXPORTS = ("meta", *FILES)
PROBE = 32


def export(
    path: Path, destination: Path, to: str, dtype: str | None = None, notice: Notice = lambda text: None
) -> LogitComparison:
    """Write `path` as a `to` checkpoint at `destination` (a folder for meta, else a file) and prove it.

    Raises ConvertError where the format cannot hold the model without loss; then nothing is left at `destination`.
    What another process has made there stays as it is.
    """
    source = open_source(path)
    targets = make_plan(source, dtype)
    write, rename, adjacent = _writer(source, to)
    renamed = [_renamed(source, target, rename, to, adjacent) for target in targets]
    temporary = partial_of(destination)
    with exclusive(destination, notice):
        if os.path.lexists(destination):
            raise ConvertError("another process made it meanwhile, of this checkpoint or of another", destination)
        _remove(temporary)
        check_free_disk(destination, sum(target.nbytes for target in targets))
        try:
            write(temporary, source, renamed)
            if to == "meta" and not copy_tokenizer(source.path, temporary):
                notice("no tokenizer is written: Meta's files take tokenizer.model, and the source has none")
            if to == "llama2c":
                notice("no tokenizer is written: llama2.c reads it from a file of its own, tokenizer.bin")
            _sync(temporary)
            with np.errstate(all="ignore"):  # absurd weights give inf and NaN: the comparison reports them
                comparison = _prove(source, targets, temporary)
            temporary.rename(destination)
        finally:
            _remove(temporary)
    return comparison


Writer = Callable[[Path, Source, Sequence[Target]], None]


def _writer(source: Source, to: str) -> tuple[Writer, Callable[[str], str | None], bool]:
    """Who writes it, what tensors are called there, and whether pairs are adjacent there."""
    if to == "meta":
        return write_mistral if source.values()["model_type"] == "mistral" else write_meta, meta_name, True
    if to == "llama2c":
        return write_llama2c, meta_name, True
    assert to == "gguf", to
    return write_gguf, gguf_name, source.values()["model_type"] in ("llama", "mistral")


def _renamed(source: Source, target: Target, rename: Callable[[str], str | None], to: str, adjacent: bool) -> Target:
    name = rename(target.name)
    if name is None:
        kind = source.values()["model_type"]
        text = f"{to} has no place for tensor {target.name} of a {kind} model: --to hf and --to gguf have"
        raise ConvertError(text, source.path)
    heads = rope_heads(target.name, source.values()) if adjacent else None
    if heads is None:
        return Target(name, target.shape, target.dtype, target.source, target.transform, target.read)
    return Target(
        name, target.shape, target.dtype, target.source, target.transform, lambda: to_adjacent(target.read(), heads)
    )


def _prove(source: Source, targets: Sequence[Target], written: Path) -> LogitComparison:
    again = open_source(written)
    back = {target.name: target for target in make_plan(again)}
    for target in targets:
        other = back.pop(target.name, None)
        if other is None or not np.array_equal(_values(target), _values(other)):
            raise ConvertError(f"tensor {target.name} does not read back as it was written", source.path)
    if back:
        raise ConvertError(f"tensor {next(iter(back))} appeared in what was written", source.path)
    vocabulary: Any = source.values()["vocab_size"]
    ids = [int(i) for i in np.random.default_rng(0).integers(0, vocabulary, PROBE)]
    original, result = source_reading(source), source_reading(again)
    rotation = compare_rotation(original, result)
    if not rotation.passed:
        raise ConvertError(f"export refused: rotary frequencies of source and result {rotation.line()}", source.path)
    windows = compare_windows(original, result)
    if not windows.passed:
        raise ConvertError(f"export refused: sliding windows of source and result {windows.line()}", source.path)
    comparison = compare(original, result, ids, is_lossless(targets))
    if not comparison.passed:
        raise ConvertError(f"export refused: logits of source and result {comparison.line()}", source.path)
    return comparison


def _values(target: Target) -> Any:
    return to_float32(target.read(), target.dtype)


def _sync(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        with suppress(FileNotFoundError):
            path.unlink()
