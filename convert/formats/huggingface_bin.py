"""Hugging Face folders with pickled weights (pytorch_model*.bin): same names and pairing as safetensors, read safely.

Knows nothing of pickles (torch_pickle.py) or of other formats.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from convert.errors import ConvertError
from convert.formats.huggingface import tokenizer_texts
from convert.formats.huggingface_config import with_defaults
from convert.formats.internlm2 import MODEL_TYPE as INTERNLM2
from convert.formats.internlm2 import internlm2_source
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.json_file import read_json
from convert.source import Source, SourceTensor

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def is_huggingface_bin(folder: Path) -> bool:
    """config.json beside one pickled file or an index of several."""
    return (folder / "config.json").is_file() and ((folder / SINGLE).is_file() or (folder / INDEX).is_file())


def open_huggingface_bin(folder: Path) -> Source:
    """Raises ConvertError for damage, names that could run code, and shards that the index does not describe."""
    raw, table = read_json(folder / "config.json"), _tensors(folder)
    if raw.get("model_type") == INTERNLM2:
        return internlm2_source(folder, raw, table, lambda: tokenizer_texts(folder))
    config = with_defaults(folder / "config.json", raw)
    dropped = {name: "RoPE table, recomputed" for name in table if name.endswith("rotary_emb.inv_freq")}
    tied, head, embedding = config["tie_word_embeddings"].value, "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in table and embedding in table:
        if not np.array_equal(table[head].read(), table[embedding].read()):
            raise ConvertError("tie_word_embeddings is true, but lm_head.weight differs from the embedding", folder)
        dropped[head] = f"equals {embedding}"
    return Source(
        path=folder, format="huggingface-bin", architecture=str(config["model_type"].value), pairing="split_half",
        config=config, names={name: name for name in table if name not in dropped}, table=table,
        raw={key: entry.value for key, entry in config.items()}, dropped=dropped,
        tokenizer_files=lambda: tokenizer_texts(folder),
    )  # fmt: skip


def _tensors(folder: Path) -> dict[str, SourceTensor]:
    if not (folder / INDEX).is_file():
        return state_tensors(folder / SINGLE, read_torch(folder / SINGLE))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError("no weight_map", folder / INDEX)
    table: dict[str, SourceTensor] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        path = folder / shard
        if Path(shard).name != shard or not path.is_file():
            raise ConvertError(f"shard {shard!r} is not in the folder", folder / INDEX)
        found = state_tensors(path, read_torch(path))
        if stray := [name for name in found if weight_map.get(name) != shard]:
            raise ConvertError(f"tensor {stray[0]!r} is not where {INDEX} says", path)
        table |= found
    if missing := sorted(weight_map.keys() - table.keys()):
        raise ConvertError(f"tensor {missing[0]!r} is in no shard", folder / INDEX)
    return table
