"""The parts that every tokenizer shares: BOS and EOS around a text, and the two configs that name special tokens.

Knows nothing of where the vocabulary came from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class Special:
    """Ids with a meaning. stops: everything that ends an answer, EOS first. tokens: text by id."""

    tokens: Sequence[str]
    bos: int | None
    stops: tuple[int, ...]
    unknown: int | None
    pad: int | None
    add_bos: bool
    add_eos: bool


def finish(tokenizer: Tokenizer, special: Special) -> None:
    """Put BOS and EOS around encoded text where the source says so."""
    before = [special.bos] if special.add_bos and special.bos is not None else []
    after = [special.stops[0]] if special.add_eos and special.stops else []
    if not before and not after:
        return
    named = {index: special.tokens[index] for index in before + after}
    first, last = [named[i] for i in before], [named[i] for i in after]
    tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
        special_tokens=[(token, index) for index, token in named.items()],
    )


def special_files(special: Special) -> dict[str, str]:
    """tokenizer_config.json and generation_config.json."""
    names = {"bos_token": special.bos, "unk_token": special.unknown, "pad_token": special.pad}
    if special.stops:
        names["eos_token"] = special.stops[0]
    config: dict[str, Any] = {name: special.tokens[at] for name, at in names.items() if at is not None}
    config |= {
        "add_bos_token": special.add_bos,
        "add_eos_token": special.add_eos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation: dict[str, Any] = {"bos_token_id": special.bos, "pad_token_id": special.pad}
    generation = {key: value for key, value in generation.items() if value is not None}
    if special.stops:
        generation["eos_token_id"] = list(special.stops)
    return {"tokenizer_config.json": to_json(config), "generation_config.json": to_json(generation)}


def to_json(value: dict[str, Any]) -> str:
    """Indented JSON with a last newline; text stays readable."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
