"""The tokenizer beside a checkpoint that does not carry one: tekken, sentencepiece or tiktoken, told by content.

Knows nothing of tensors. A folder without any of them converts without a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from convert.errors import ConvertError
from convert.tokenizer.protobuf import SentencepieceModel, parse_model
from convert.tokenizer.sentencepiece import sentencepiece_files, unigram_files
from convert.tokenizer.tekken import is_tekken, tekken_files
from convert.tokenizer.tiktoken import read_ranks, tiktoken_files

LARGEST_FILE = 64 << 20


def folder_tokenizer(folder: Path, llama31: bool = False) -> dict[str, str]:
    """File name -> text for tokenizer.json and its companions; {} when there is no tokenizer.

    The first of several in the order of names reversed, so that tokenizer.model.v3 wins over tokenizer.model.
    """
    for path in sorted(folder.iterdir(), reverse=True):
        if path.is_file() and path.stat().st_size <= LARGEST_FILE:
            files = tokenizer_file(path, llama31)
            if files:
                return files
            if path.name == "tekken.json" or path.name.startswith("tokenizer.model"):
                raise ConvertError("not a tokenizer of a known kind, or damaged: copy it again or take it away", path)
    return {}


def tokenizer_file(path: Path, llama31: bool = False) -> dict[str, str]:
    """What `path` becomes if it is a tokenizer, else {}. Raises ConvertError for a tokenizer that cannot be kept."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.lstrip()[:1] == b"{":
        value = _json(path)
        return tekken_files(value, path) if isinstance(value, dict) and is_tekken(value) else {}
    if start[:1] == b"\x0a" and (model := parse_model(path.read_bytes())) is not None:
        return _sentencepiece(model, path)
    if start.split(b"\n")[0].endswith(b" 0") and (ranks := read_ranks(path.read_bytes())) is not None:
        return tiktoken_files(ranks, path, llama31)
    return {}


def _sentencepiece(model: SentencepieceModel, path: Path) -> dict[str, str]:
    if model.oddity is not None:
        raise ConvertError(f"sentencepiece model with {model.oddity}, which no tokenizer.json says", path)
    if model.algorithm == "bpe" and not model.charsmap:
        return sentencepiece_files(model.pieces, path, model.spaces)
    if model.algorithm == "unigram":
        return unigram_files(model.pieces, path, model.charsmap, model.spaces)
    raise ConvertError(f"sentencepiece model of type {model.algorithm} with a normaliser is not supported", path)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
