"""The few fields of a sentencepiece model that matter, read from its protobuf without a protobuf library.

Knows nothing of tokenizers. Field numbers are those of sentencepiece_model.proto, which are fixed for good.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convert.tokenizer.sentencepiece import KINDS, Piece, Spaces

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Field = tuple[int, int | bytes]


@dataclass(frozen=True, slots=True)
class SentencepieceModel:
    """algorithm: unigram, bpe, word or char. charsmap: the precompiled normaliser, empty for none. oddity: a flag that
    changes tokens and is not what every model known sets it to.
    """

    pieces: list[Piece]
    algorithm: str
    charsmap: bytes
    spaces: Spaces
    oddity: str | None


def parse_model(raw: bytes) -> SentencepieceModel | None:
    """None if `raw` is not a sentencepiece model."""
    try:
        return _parse(raw)
    except (ValueError, KeyError, IndexError, struct.error, TypeError):
        return None


def _parse(raw: bytes) -> SentencepieceModel | None:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces or not trainer:
        return None
    algorithm = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}[int(trainer.get(3, 1))]
    charsmap = normalizer.get(2, b"")
    assert isinstance(charsmap, bytes)
    spaces = Spaces(prefix=bool(normalizer.get(3, 1)), squeezed=bool(normalizer.get(4, 1)))
    return SentencepieceModel(pieces, algorithm, charsmap, spaces, _oddity(trainer, normalizer))


def _oddity(trainer: Mapping[int, object], normalizer: Mapping[int, object]) -> str | None:
    if not normalizer.get(5, 1):
        return "escape_whitespaces off"
    return "treat_whitespace_as_suffix on" if trainer.get(24, 0) else None


def _piece(raw: bytes) -> Piece:
    fields = dict(_fields(raw))
    text, score = fields[1], fields.get(2, bytes(4))
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("not a piece")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], KINDS[int(fields.get(3, 1))])


def _fields(raw: bytes) -> Iterator[Field]:
    """Number and value of each field; fixed-width values stay bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if kind == BYTES:
            size, at = _varint(raw, at)
        if size is None or size > len(raw) - at:
            raise ValueError("not a protobuf")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = raw[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("not a varint")
