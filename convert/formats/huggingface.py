"""Hugging Face folders: config.json beside safetensors. They are canonical already and served as they are.

Knows nothing of other formats. Every shard's header and length is checked before a tensor is believed.
"""

from __future__ import annotations

from pathlib import Path

from convert.canonical import INTERNLM2, SINGLE, quantisation
from convert.errors import ConvertError
from convert.formats.huggingface_config import with_defaults
from convert.formats.huggingface_leftovers import leftovers
from convert.formats.internlm2 import internlm2_source
from convert.formats.quantised import quantised_source
from convert.json_file import read_json, read_text
from convert.source import Source, SourceTensor, file_tensor
from convert.tokenizer.folder import folder_tokenizer
from model.safetensors_header import INDEX, WeightsError, check_size, read_header
from model.shard_index import read_shards

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


def open_huggingface(folder: Path) -> Source:
    """Read config.json and the header of every shard. Raises ConvertError for damage of any kind."""
    config = read_json(folder / "config.json")
    table = read_folder(folder)
    if (said := quantisation(folder, config)) is not None:
        return quantised_source(folder, config, said, table, lambda: tokenizer_texts(folder))
    if config.get("model_type") == INTERNLM2:
        return internlm2_source(folder, config, table, lambda: tokenizer_texts(folder))
    entries, dropped = with_defaults(folder / "config.json", config), leftovers(folder, config, table)
    return Source(
        path=folder, format="huggingface", architecture=config["model_type"], pairing="split_half",
        config=entries, table=table, raw=config, dropped=dropped,
        names={name: name for name in table if name not in dropped}, tokenizer_files=lambda: tokenizer_texts(folder),
    )  # fmt: skip


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """The tokenizer's files as they are; from a sentencepiece or tiktoken file where tokenizer.json is missing."""
    found = {name: read_text(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return found if "tokenizer.json" in found else folder_tokenizer(folder) | found


def read_folder(folder: Path) -> dict[str, SourceTensor]:
    """The tensors of the single file or of every shard that the index names, each in the file that it is said to be."""
    if not (folder / INDEX).is_file():
        return read_safetensors(folder / SINGLE)
    try:
        return read_shards(folder / INDEX, read_safetensors)
    except WeightsError as error:
        raise ConvertError(str(error), folder) from None


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """The tensor table of one file; data ranges must tile the file exactly."""
    try:
        header = read_header(path)
        check_size(path, header)
    except WeightsError as error:
        raise ConvertError(str(error), path.parent) from None
    entries = header.entries.items()
    return {
        name: file_tensor(name, path, entry.dtype, entry.shape, entry.offset, entry.nbytes) for name, entry in entries
    }
