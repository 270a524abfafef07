"""The tokenizer file of llama2.c, found beside the checkpoint by its content, to tokenizer.json.

Knows nothing of tensors. Tokens have their spaces un-escaped and bytes as <0xNN>; ids 0, 1, 2 are unknown, BOS, EOS.
"""

from __future__ import annotations

import struct
from pathlib import Path

from convert.tokenizer.sentencepiece import Kind, Piece, Spaces, sentencepiece_files

LARGEST_FILE = 16 << 20
NAMES = {0: "<unk>", 1: "<s>", 2: "</s>"}


def tokenizer_files(checkpoint: Path, vocab_size: int) -> dict[str, str]:
    """File name -> text, from the file beside `checkpoint` that holds exactly vocab_size tokens; {} if none does."""
    for path in sorted(checkpoint.parent.glob("*.bin")):
        if path != checkpoint and path.stat().st_size < LARGEST_FILE:
            tokens = read_tokens(path.read_bytes(), vocab_size)
            if tokens is not None:
                return sentencepiece_files(_pieces(tokens), path, Spaces())
    return {}


def read_tokens(raw: bytes, vocab_size: int) -> list[tuple[float, bytes]] | None:
    """Score and bytes of each token, or None if `raw` is not a file of vocab_size tokens to its last byte."""
    at, tokens = 4, []
    for _ in range(vocab_size):
        if at + 8 > len(raw):
            return None
        score, length = struct.unpack_from("<fi", raw, at)
        if not 0 <= length <= len(raw) - at - 8:
            return None
        tokens.append((score, raw[at + 8 : at + 8 + length]))
        at += 8 + length
    return tokens if at == len(raw) else None


def _pieces(tokens: list[tuple[float, bytes]]) -> list[Piece]:
    pieces = []
    for index, (score, text) in enumerate(tokens):
        name = NAMES.get(index, text.decode("utf-8", "replace").replace(" ", "▁"))
        kind: Kind = "unknown" if index == 0 else "control" if index in NAMES else "normal"
        if kind == "normal" and len(text) == 6 and text.startswith(b"<0x"):
            kind = "byte"
        pieces.append(Piece(name, score, kind))
    return pieces
