"""tokenizer.json to GGUF metadata, for the tokenizers whose metadata rebuilds the very same one.

Knows nothing of tensors. A tokenizer that would come back different is refused: a model with other tokens is another
model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from convert.errors import ConvertError
from convert.tokenizer.gguf import PREFIX, tokenizer_files
from convert.tokenizer.pre_tokenizers import CUTS
from convert.tokenizer.sentencepiece import KINDS

CODES = {kind: code for code, kind in KINDS.items()}
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(files: Mapping[str, str], vocab_size: int, path: Path) -> dict[str, Any]:
    """tokenizer.* keys for the files of a canonical folder; {} where there is no tokenizer. Raises ConvertError."""
    if "tokenizer.json" not in files:
        return {}
    try:
        Tokenizer.from_str(files["tokenizer.json"])
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"tokenizer.json is not a tokenizer: {error}", path) from error
    tokenizer = json.loads(files["tokenizer.json"])
    settings = json.loads(files.get("tokenizer_config.json", "{}"))
    if tokenizer["model"]["type"] != "BPE":
        raise ConvertError(f"a {tokenizer['model']['type']} tokenizer cannot be written to GGUF", path)
    metadata = _vocabulary(tokenizer, vocab_size) | _special(tokenizer, settings, files)
    metadata |= _byte_level(tokenizer, path) if _is_byte_level(tokenizer) else _sentencepiece(tokenizer, metadata)
    if "chat_template.jinja" in files:
        metadata["tokenizer.chat_template"] = files["chat_template.jinja"]
    again = json.loads(tokenizer_files(metadata, path)["tokenizer.json"])
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if again[part] != tokenizer.get(part):
            raise ConvertError(f"the tokenizer's {part} cannot be written to GGUF without loss", path)
    if _merges(again) != _merges(tokenizer):
        raise ConvertError("the tokenizer's merges cannot be written to GGUF without loss", path)
    return metadata


def _merges(tokenizer: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = tokenizer["model"]["merges"]
    split = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in pairs]
    return [(left, right) for left, right in split]


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    return "ByteLevel" in json.dumps(tokenizer.get("pre_tokenizer"))


def _vocabulary(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Tokens by id; rows of the embedding without a token are named [PADn] and marked unused."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [CODES["unused"]] * vocab_size
    for text, index in tokenizer["model"]["vocab"].items():
        is_byte = len(text) == 6 and text.startswith("<0x") and tokenizer["model"].get("byte_fallback")
        tokens[index], types[index] = text, CODES["byte" if is_byte else "normal"]
    for added in tokenizer["added_tokens"]:
        index = added["id"]
        tokens[index] = added["content"]
        types[index] = CODES["control" if added["special"] else "user_defined"]
    if not _is_byte_level(tokenizer) and (unknown := tokenizer["model"].get("unk_token")) in tokens:
        types[tokens.index(unknown)] = CODES["unknown"]
    return {PREFIX + "tokens": tokens, PREFIX + "token_type": types}


def _special(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    ids = tokenizer["model"]["vocab"] | {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    found: dict[str, Any] = {}
    for key, name in NAMED.items():
        text = settings.get(key)
        text = text["content"] if isinstance(text, dict) else text
        if text in ids:
            found[f"{PREFIX}{name}_token_id"] = ids[text]
    stops = json.loads(files.get("generation_config.json", "{}")).get("eos_token_id")
    for name, index in zip(("eos", "eot", "eom"), stops if isinstance(stops, list) else [], strict=False):
        found[f"{PREFIX}{name}_token_id"] = index
    adds_bos = "SpecialToken" in json.dumps(tokenizer["post_processor"])
    return found | {PREFIX + "add_bos_token": bool(settings.get("add_bos_token", adds_bos))}


def _byte_level(tokenizer: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The named pre-tokenizer that cuts in exactly this way."""
    from tokenizers import Tokenizer, models

    for name, cut in CUTS.items():
        probe = Tokenizer(models.BPE())
        probe.pre_tokenizer = cut.build()
        same = json.loads(probe.to_str())["pre_tokenizer"] == tokenizer["pre_tokenizer"]
        if same and cut.ignore_merges == bool(tokenizer["model"].get("ignore_merges")):
            merges = [" ".join(pair) for pair in _merges(tokenizer)]
            return {PREFIX + "model": "gpt2", PREFIX + "pre": name, PREFIX + "merges": merges}
    raise ConvertError("no pre-tokenizer of GGUF cuts text as this tokenizer does", path)


def _sentencepiece(tokenizer: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    group = _score_groups([left + right for left, right in _merges(tokenizer)])
    scores = [-float(group.get(text, len(group))) for text in metadata[PREFIX + "tokens"]]
    prefix = "Prepend" in json.dumps(tokenizer["normalizer"])
    return {
        PREFIX + "model": "llama", PREFIX + "pre": "default", PREFIX + "scores": scores,
        PREFIX + "add_space_prefix": prefix,
    }  # fmt: skip


def _score_groups(made: list[str]) -> dict[str, int]:
    """Ranks that bring the merges back: made holds the token of each merge. Merges go by score, and within one score
    by the ids of the parts, so tokens whose merges interleave had the same score.
    """
    last = {text: place for place, text in enumerate(made)}
    group: dict[str, int] = {}
    current, end = -1, -1
    for place, text in enumerate(made):
        if place > end:
            current += 1
        end = max(end, last[text])
        group[text] = current
    return group
