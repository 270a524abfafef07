"""Mistral's tekken.json to tokenizer.json.

Knows nothing of tensors. The regex comes from the file, never from another model; special tokens take the first ids,
and only as many ranks are used as the default vocabulary has room for.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.tokenizer.assemble import Special, finish, special_files
from convert.tokenizer.byte_level import ranked_tokenizer

BOS, EOS, UNKNOWN, PAD = "<s>", "</s>", "<unk>", "<pad>"
MOST_TOKENS = 1 << 22
OLD_SPECIALS = [
    UNKNOWN, BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", PAD, "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip
"""Files before version 7 do not list their special tokens; these are the ones that they all had."""


def is_tekken(value: dict[str, Any]) -> bool:
    """A JSON object with a vocabulary of ranked bytes and a regex."""
    config = value.get("config")
    return isinstance(config, dict) and "pattern" in config and isinstance(value.get("vocab"), list)


def tekken_files(value: dict[str, Any], path: Path) -> dict[str, str]:
    """File name -> text. Raises ConvertError naming what does not fit."""
    try:
        config = value["config"]
        size, count, pattern = config["default_vocab_size"], config["default_num_special_tokens"], config["pattern"]
        if not all(isinstance(number, int) and 0 < number <= MOST_TOKENS for number in (size, count)):
            raise TypeError(f"{size!r} tokens, {count!r} of them special")
        rows = sorted(value["vocab"], key=lambda row: row["rank"])[: max(size - count, 0)]
        ranks = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        listed = [row["token_str"] for row in sorted(value.get("special_tokens") or [], key=lambda row: row["rank"])]
        sound = [row["rank"] for row in rows] == list(range(size - count))
    except (KeyError, TypeError, ValueError) as error:
        raise ConvertError(f"not a sound tekken file: {type(error).__name__} {error}", path) from error
    names = listed or OLD_SPECIALS
    sound = sound and all(isinstance(name, str) for name in names)
    if not sound or len(names) > count:
        raise ConvertError(f"ranks are not 0 to {size - count - 1}, or more than {count} special tokens", path)
    specials = names + [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    tokenizer, texts = ranked_tokenizer(ranks, specials, True, pattern, path)

    def place(name: str) -> int | None:
        return specials.index(name) if name in specials else None

    eos = place(EOS)
    stops = () if eos is None else (eos,)
    special = Special(texts, place(BOS), stops, place(UNKNOWN), place(PAD), add_bos=True, add_eos=False)
    finish(tokenizer, special)
    return {"tokenizer.json": tokenizer.to_str(), **special_files(special)}
