"""The bytes each token stands for, read from the vocabulary and the decoder section of tokenizer.json.

Needs no tokenizer library: text is the concatenation of these bytes, decoded as UTF-8 with U+FFFD for what is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Piece = str | bytes
Step = Callable[[Piece], Piece]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """pieces[id]: bytes of the token (empty for an id that no token has). special: ids that are no text.

    leading_spaces: how many spaces the decoder takes off the start of a whole text.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    leading_spaces: int

    def __getitem__(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def label(self, token: int) -> str:
        """The token as a name in a log-probability list: its text, or its bytes when they are no whole characters."""
        try:
            return self[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[token])


def read_token_bytes(description: dict[str, Any]) -> TokenBytes:
    """description: tokenizer.json as parsed. ValueError if its decoder is of a kind that is not known here."""
    tokens = vocabulary(description["model"]) | {item["id"]: item["content"] for item in description["added_tokens"]}
    steps, leading_spaces = decoder_steps(description.get("decoder"))
    pieces = [b""] * (max(tokens) + 1)
    for id, token in tokens.items():
        piece: Piece = token
        for step in steps:
            piece = step(piece)
        pieces[id] = piece.encode(errors="replace") if isinstance(piece, str) else piece
    special = frozenset(item["id"] for item in description["added_tokens"] if item["special"])
    return TokenBytes(tuple(pieces), special, leading_spaces)


def vocabulary(model: dict[str, Any]) -> dict[int, str]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: (piece, score) pairs in id order
        return {id: piece for id, (piece, _) in enumerate(vocab)}
    return {id: token for token, id in vocab.items()}


def decoder_steps(decoder: dict[str, Any] | None) -> tuple[list[Step], int]:
    """What happens to one token on its own, and how many spaces the whole text loses at its start."""
    steps: list[Step] = []
    leading_spaces = 0
    for part in flatten(decoder):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(from_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(from_byte_fallback)
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                steps.append(replacing(old, new))
            case {"type": "Metaspace", "replacement": mark}:
                steps.append(replacing(mark, " "))
                leading_spaces = 0 if part.get("prepend_scheme") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                leading_spaces = start
            case {"type": "Fuse"}:
                pass
            case {"type": "Join"}:
                steps.append(lambda piece: " " + piece if isinstance(piece, str) else piece)
                leading_spaces = 1
            case _:
                raise ValueError(f"tokenizer.json: the decoder part {part} is not supported")
    return steps, leading_spaces


def flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A tokenizer without a decoder joins its tokens with spaces."""
    if decoder is None:
        return [{"type": "Join"}]
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in flatten(inner)]
    return [decoder]


def replacing(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: those that print keep theirs, the rest move up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(moved)}


BYTE_OF = byte_alphabet()


def from_byte_level(piece: Piece) -> Piece:
    """A token with any character outside the alphabet (an added token) stands for its own text."""
    if isinstance(piece, bytes) or not all(char in BYTE_OF for char in piece):
        return piece
    return bytes(BYTE_OF[char] for char in piece)


def from_byte_fallback(piece: Piece) -> Piece:
    if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece
