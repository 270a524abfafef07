"""GGUF metadata to tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

Knows nothing of tensors. What the file does not say (the flags of added tokens, the exact normaliser) follows
llama.cpp's behaviour; the tests hold every vocabulary to its golden ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from convert.errors import ConvertError
from convert.tokenizer.assemble import Special, finish, special_files
from convert.tokenizer.pre_tokenizers import CUTS
from convert.tokenizer.sentencepiece import KINDS, Piece, Spaces, add_special, bpe, sentencepiece_tokenizer, vocabulary

PREFIX = "tokenizer.ggml."


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """File name -> text. Raises ConvertError for a model or pre-tokenizer that is not known. Empty: no tokenizer."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        return {}
    tokens, types = metadata.get(PREFIX + "tokens"), metadata.get(PREFIX + "token_type")
    if not isinstance(tokens, list) or not isinstance(types, list | tuple) or len(types) != len(tokens):
        raise ConvertError("tokenizer.ggml.tokens and token_type are missing or differ in length", path)
    pieces = _pieces(metadata, tokens, types, path)
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, path)
    elif model == "llama":
        if PREFIX + "scores" not in metadata:
            raise ConvertError("tokenizer.ggml.scores is missing", path)
        spaces = Spaces(prefix=bool(metadata.get(PREFIX + "add_space_prefix", True)))
        tokenizer, add_bos = sentencepiece_tokenizer(pieces, path, spaces), True
    else:
        raise ConvertError(f"tokenizer model {model!r} is not supported (known: gpt2, llama)", path)
    add_special(tokenizer, pieces)
    special = _special(metadata, tokens, add_bos, path)
    finish(tokenizer, special)
    files = {"tokenizer.json": tokenizer.to_str(), **special_files(special)}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    return files


def _pieces(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], path: Path) -> list[Piece]:
    scores = metadata.get(PREFIX + "scores")
    if scores is None:
        scores = [0.0] * len(tokens)
    numbers = isinstance(scores, list | tuple) and all(isinstance(score, float) for score in scores)
    if not numbers or len(scores) != len(tokens) or not set(types) <= KINDS.keys():
        raise ConvertError("tokenizer.ggml.scores or token_type does not fit tokens", path)
    rows = zip(tokens, scores, types, strict=True)
    return [Piece(text, float(score), KINDS[int(kind)]) for text, score, kind in rows]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata.get(PREFIX + "pre")
    cut = CUTS.get(str(name))
    if cut is None:
        raise ConvertError(f"pre-tokenizer {name!r} is not known; guessing would give wrong tokens", path)
    lines = metadata.get(PREFIX + "merges")
    if not isinstance(lines, list):
        raise ConvertError("tokenizer.ggml.merges is missing", path)
    merges = [tuple(line.split(" ", 1)) for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise ConvertError("tokenizer.ggml.merges: a line is not two pieces", path)
    model = bpe(path, vocab=vocabulary(tokens, path), merges=merges, ignore_merges=cut.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.add_bos


def token_id(metadata: Mapping[str, Any], key: str, path: Path) -> int:
    """The id of a special token. Raises ConvertError for what is no id at all."""
    value = metadata[key]
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ConvertError(f"metadata {key} is {str(value)[:60]!r}, expected a token id", path)
    return value


def _special(metadata: Mapping[str, Any], tokens: list[str], add_bos: bool, path: Path) -> Special:
    def place(name: str) -> int | None:
        key = f"{PREFIX}{name}_token_id"
        if key not in metadata:
            return None
        value = token_id(metadata, key, path)
        if value >= len(tokens):
            raise ConvertError(f"{key} {value} is outside the vocabulary of {len(tokens)}", path)
        return value

    stops = [place(name) for name in ("eos", "eot", "eom")]
    return Special(
        tokens=tokens, bos=place("bos"), stops=tuple(dict.fromkeys(s for s in stops if s is not None)),
        unknown=place("unknown"), pad=place("padding"),
        add_bos=bool(metadata.get(PREFIX + "add_bos_token", add_bos)),
        add_eos=bool(metadata.get(PREFIX + "add_eos_token", False)),
    )  # fmt: skip
