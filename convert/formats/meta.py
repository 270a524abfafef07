"""Meta's folders (params.json, model-parallel *.pth) and Mistral's own (params.json, consolidated safetensors).

Knows nothing of tokenizers. Shards are joined when a tensor is read; along which dimension, the shapes decide, since
Llama 1 and 2 cut the embedding by columns and Llama 3 by rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.formats.huggingface import read_safetensors
from convert.formats.meta_config import meta_config
from convert.formats.meta_names import hugging_face_names
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.json_file import read_json
from convert.source import Source, SourceTensor
from convert.tokenizer.folder import folder_tokenizer

PARAMS, CHECKLIST = "params.json", "checklist.chk"
ROPE_TABLE = "rope.freqs"
SPLIT_BY_ROWS = re.compile(r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight")
SPLIT_BY_COLUMNS = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
EMBEDDING = "tok_embeddings.weight"
KEY_VALUE = re.compile(r"layers\.\d+\.attention\.w[kv]\.weight")


def is_meta(folder: Path) -> bool:
    """params.json beside *.pth or consolidated safetensors."""
    return (folder / PARAMS).is_file() and bool(_pth_files(folder) or _safetensors_files(folder))


def _pth_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pth"))


def _safetensors_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("consolidated*.safetensors"))


def open_meta(folder: Path) -> Source:
    """Raises ConvertError for shards that do not fit together, a failing checklist, or unknown keys of params.json."""
    params = read_json(folder / PARAMS)
    _verify_checklist(folder)
    native = _safetensors_files(folder)
    if native and _pth_files(folder):
        raise ConvertError("holds both *.pth and consolidated safetensors: keep one of them", folder)
    table = _join_files(folder, native) if native else _join_ranks(folder, params)
    dropped = {ROPE_TABLE: "RoPE table, recomputed from rope_theta"} if ROPE_TABLE in table else {}
    config = meta_config(folder / PARAMS, params, table, "mistral" if native else "llama")
    if config["tie_word_embeddings"].value and "output.weight" in table:
        dropped["output.weight"] = "equals tok_embeddings.weight"
    names = {name: target for name, target in hugging_face_names(table).items() if name not in dropped}
    return Source(
        path=folder, format="mistral" if native else "meta", architecture=config["model_type"].value,
        pairing="adjacent", config=config, names=names, table=table, raw=params, dropped=dropped,
        tokenizer_files=lambda: folder_tokenizer(folder, bool(params.get("use_scaled_rope"))),
    )  # fmt: skip


def _verify_checklist(folder: Path) -> None:
    """checklist.chk holds lines `md5  name`; files that are there must match."""
    if not (folder / CHECKLIST).is_file():
        return
    for line in (folder / CHECKLIST).read_text("utf-8", "replace").split("\n"):
        digest, _, name = line.strip().partition(" ")
        path = folder / Path(name.strip(" *")).name
        if not name or not path.is_file():
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != digest.lower():
            raise ConvertError(f"md5 is {found}, {CHECKLIST} says {digest} (incomplete download?)", path)


def _join_files(folder: Path, paths: list[Path]) -> dict[str, SourceTensor]:
    table: dict[str, SourceTensor] = {}
    for path in paths:
        found = read_safetensors(path)
        if twice := found.keys() & table.keys():
            raise ConvertError(f"tensor {sorted(twice)[0]!r} is in two files", path)
        table |= found
    return table


def _join_ranks(folder: Path, params: dict[str, Any]) -> dict[str, SourceTensor]:
    ranks = [state_tensors(path, read_torch(path)) for path in _pth_files(folder)]
    first = ranks[0]
    for path, rank in zip(_pth_files(folder), ranks, strict=True):
        if rank.keys() != first.keys():
            raise ConvertError(f"tensor {sorted(rank.keys() ^ first.keys())[0]!r} is not in every shard", path)
        if different := [name for name in first if rank[name].shape != first[name].shape]:
            raise ConvertError(f"tensor {different[0]!r} has another shape than in the first shard", path)
    if len(ranks) == 1:
        return first
    return {name: _join(name, [rank[name] for rank in ranks], params) for name in first}


def _join(name: str, parts: list[SourceTensor], params: dict[str, Any]) -> SourceTensor:
    shape, count = parts[0].shape, len(parts)
    if name == EMBEDDING:
        axis: int | None = 1 if shape[-1:] == (params.get("dim", 0) // count,) else 0
    elif SPLIT_BY_ROWS.fullmatch(name):
        axis = 0
    else:
        axis = 1 if SPLIT_BY_COLUMNS.fullmatch(name) else None
    if axis is not None and len(shape) != 2:
        raise ConvertError(f"tensor {name!r} has shape {shape}, expected a matrix", parts[0].path, parts[0].offset)
    if axis is None:
        return _joined(name, parts, shape, f"{count} equal copies", lambda: _same(name, parts))
    keep = _repeats(name, parts, params)
    whole = [parts[i] for i in range(0, count, keep)]
    full = (shape[0] * len(whole), *shape[1:]) if axis == 0 else (shape[0], shape[1] * count)

    def read() -> Array:
        for i in range(0, count, keep):
            _same(name, parts[i : i + keep])
        return np.concatenate([part.read() for part in whole], axis=axis)

    return _joined(name, parts, full, f"{len(whole)} shards along dimension {axis}", read)


def _repeats(name: str, parts: list[SourceTensor], params: dict[str, Any]) -> int:
    """With more shards than key heads every key head is stored several times in a row."""
    kv_heads = params.get("n_kv_heads") or params.get("n_heads") or 0
    if KEY_VALUE.fullmatch(name) is None or not isinstance(kv_heads, int) or not 0 < kv_heads < len(parts):
        return 1
    return len(parts) // kv_heads


def _same(name: str, parts: list[SourceTensor]) -> Array:
    first = parts[0].read()
    for part in parts[1:]:
        if not np.array_equal(first, part.read()):
            raise ConvertError(f"tensor {name!r} must be the same in every shard and is not", part.path, part.offset)
    return first


def _joined(
    name: str, parts: list[SourceTensor], shape: tuple[int, ...], how: str, read: Callable[[], Array]
) -> SourceTensor:
    first = parts[0]
    extents = tuple(extent for part in parts for extent in part.extents)
    return SourceTensor(name, shape, first.dtype, first.dtype, first.path, first.offset, read, how=how, extents=extents)
