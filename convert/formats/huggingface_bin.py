"""Hugging Face folders with pickled weights (pytorch_model*.bin): same names and pairing as safetensors, read safely.

Knows nothing of pickles (torch_pickle.py) or of other formats.
"""

from __future__ import annotations

from pathlib import Path

from convert.canonical import INTERNLM2
from convert.errors import ConvertError
from convert.formats.huggingface import tokenizer_texts
from convert.formats.huggingface_config import with_defaults
from convert.formats.huggingface_leftovers import leftovers
from convert.formats.internlm2 import internlm2_source
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.json_file import read_json
from convert.source import Source, SourceTensor
from model.safetensors_header import WeightsError
from model.shard_index import read_shards

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
    values = {key: entry.value for key, entry in config.items()}
    dropped = leftovers(folder, values, table)
    return Source(
        path=folder, format="huggingface-bin", architecture=str(config["model_type"].value), pairing="split_half",
        config=config, names={name: name for name in table if name not in dropped}, table=table,
        raw=values, dropped=dropped, tokenizer_files=lambda: tokenizer_texts(folder),
    )  # fmt: skip


def _tensors(folder: Path) -> dict[str, SourceTensor]:
    if not (folder / INDEX).is_file():
        return state_tensors(folder / SINGLE, read_torch(folder / SINGLE))
    try:
        return read_shards(folder / INDEX, lambda path: state_tensors(path, read_torch(path)))
    except WeightsError as error:
        raise ConvertError(str(error), folder) from None
