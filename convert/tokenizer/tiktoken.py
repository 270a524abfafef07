"""Llama 3's tokenizer file (lines of base64 and rank) to tokenizer.json.

Knows nothing of tensors. The file holds neither the regex nor the special tokens: both are Llama 3's, and a file of
another size is refused. Llama 3.1 gave some reserved ids names.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from convert.errors import ConvertError
from convert.tokenizer.assemble import Special, finish, special_files
from convert.tokenizer.byte_level import ranked_tokenizer
from convert.tokenizer.pre_tokenizers import LLAMA3

LLAMA3_RANKS, LLAMA3_SPECIALS = 128_000, 256
NAMED_30 = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
NAMED_31 = NAMED_30 | {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
BOS, END, PAD, EOM, EOT = 0, 1, 4, 8, 9  # places among the special tokens


def read_ranks(raw: bytes) -> list[bytes] | None:
    """The tokens by rank, or None if `raw` is not a tiktoken file whose ranks are 0, 1, 2, ..."""
    tokens = []
    for index, line in enumerate(raw.splitlines()):
        parts = line.split()
        if len(parts) != 2 or parts[1] != str(index).encode():
            return None
        try:
            tokens.append(base64.b64decode(parts[0], validate=True))
        except binascii.Error:
            return None
    return tokens or None


def tiktoken_files(ranks: list[bytes], path: Path, llama31: bool) -> dict[str, str]:
    """File name -> text. Raises ConvertError unless it is Llama 3's vocabulary."""
    if len(ranks) != LLAMA3_RANKS:
        raise ConvertError(
            f"holds {len(ranks)} ranks, Llama 3 has {LLAMA3_RANKS}; the regex of others is unknown", path
        )
    specials = special_tokens(llama31)
    tokenizer, texts = ranked_tokenizer(ranks, specials, False, LLAMA3, path)
    stops = (EOT, END, EOM) if llama31 else (EOT, END)
    special = Special(
        texts, LLAMA3_RANKS + BOS, tuple(LLAMA3_RANKS + stop for stop in stops), None,
        LLAMA3_RANKS + PAD if llama31 else None, add_bos=True, add_eos=False,
    )  # fmt: skip
    finish(tokenizer, special)
    return {"tokenizer.json": tokenizer.to_str(), **special_files(special)}


def special_tokens(llama31: bool) -> list[str]:
    """256 names; those without a meaning are numbered as reserved, in order."""
    named = NAMED_31 if llama31 else NAMED_30
    free = iter(range(LLAMA3_SPECIALS))
    return [named.get(i) or f"<|reserved_special_token_{next(free)}|>" for i in range(LLAMA3_SPECIALS)]
