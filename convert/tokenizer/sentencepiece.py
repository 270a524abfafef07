"""Sentencepiece vocabularies (BPE with byte fallback as Llama 1 and 2 use it, unigram) to tokenizer.json.

Knows nothing of where the pieces came from: GGUF metadata, a llama2.c file or a .model protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram

from convert.errors import ConvertError
from convert.tokenizer.assemble import Special, finish, special_files
from convert.tokenizer.charsmap import is_sound

Kind = Literal["normal", "unknown", "control", "user_defined", "unused", "byte"]
MOST_CUTS = 1 << 29  # squares of the lengths of all tokens, added up; 262,144 tokens of 8 characters need 2 ** 24
KINDS: dict[int, Kind] = {1: "normal", 2: "unknown", 3: "control", 4: "user_defined", 5: "unused", 6: "byte"}
"""The numbers of sentencepiece's protobuf, which GGUF took over."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its id is its place. text has spaces as ▁."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Spaces:
    """What happens to the spaces of a text. prefix: it starts as if one stood before it. squeezed: those at its ends
    are dropped, and of several in a row one stays.
    """

    prefix: bool = True
    squeezed: bool = False


def sentencepiece_files(pieces: Sequence[Piece], path: Path, spaces: Spaces) -> dict[str, str]:
    """The usual Llama arrangement: BOS added, <s> and </s> named so."""
    return _with_special(sentencepiece_tokenizer(pieces, path, spaces), pieces, add_bos=True)


def unigram_files(pieces: Sequence[Piece], path: Path, charsmap: bytes, spaces: Spaces) -> dict[str, str]:
    """Unigram models: the most probable cut of a text. charsmap: sentencepiece's precompiled normaliser."""
    unknown = next((i for i, piece in enumerate(pieces) if piece.kind == "unknown"), None)
    vocabulary([piece.text for piece in pieces], path)
    table = [(piece.text, piece.score) for piece in pieces]
    if charsmap and not is_sound(charsmap):
        raise ConvertError("the precompiled normaliser is damaged", path)
    try:
        tokenizer = Tokenizer(Unigram(table, unknown, any(piece.kind == "byte" for piece in pieces)))
        first: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"tokenizer: {error}", path) from error
    _arrange_spaces(tokenizer, spaces, first)
    return _with_special(tokenizer, pieces, add_bos=False)


def _arrange_spaces(tokenizer: Tokenizer, spaces: Spaces, first: Sequence[Any] = ()) -> None:
    """Sets normaliser and decoder. first: normalisers that see the text before its spaces are looked at."""
    steps = list(first)
    if spaces.squeezed:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spaces.prefix:
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    is_cut = spaces.prefix or spaces.squeezed
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if is_cut else back)


def _with_special(tokenizer: Tokenizer, pieces: Sequence[Piece], add_bos: bool) -> dict[str, str]:
    add_special(tokenizer, pieces)
    texts = [piece.text for piece in pieces]
    bos, eos = (texts.index(name) if name in texts else None for name in ("<s>", "</s>"))
    unknown = next((i for i, piece in enumerate(pieces) if piece.kind == "unknown"), None)
    stops = () if eos is None else (eos,)
    special = Special(texts, bos, stops, unknown, None, add_bos=add_bos and bos is not None, add_eos=False)
    finish(tokenizer, special)
    return {"tokenizer.json": tokenizer.to_str(), **special_files(special)}


def sentencepiece_tokenizer(pieces: Sequence[Piece], path: Path, spaces: Spaces) -> Tokenizer:
    """BPE; special tokens are not in it yet."""
    vocab = vocabulary([piece.text for piece in pieces], path)
    unknown = next((piece.text for piece in pieces if piece.kind == "unknown"), None)
    model = bpe(
        path, vocab=vocab, merges=merges_from_scores(pieces, vocab), unk_token=unknown, fuse_unk=True,
        byte_fallback=any(piece.kind == "byte" for piece in pieces),
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    _arrange_spaces(tokenizer, spaces)
    return tokenizer


def merges_from_scores(pieces: Sequence[Piece], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Sentencepiece keeps scores, BPE wants merges: every cut of a normal token into two known ones, best score first.

    Equal scores go by the ids of the parts.
    """
    ranked = []
    for piece in pieces:
        if piece.kind != "normal":
            continue
        for cut in range(1, len(piece.text)):
            left, right = vocab.get(piece.text[:cut]), vocab.get(piece.text[cut:])
            if left is not None and right is not None:
                ranked.append((-piece.score, left, right))
    ranked.sort()
    texts = [piece.text for piece in pieces]
    return [(texts[left], texts[right]) for _, left, right in ranked]


def add_special(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> None:
    """Control and unknown tokens are special (not shown in text); user-defined ones are matched whole but shown."""
    kinds = ("unknown", "control", "user_defined")
    tokenizer.add_tokens(
        [AddedToken(p.text, special=p.kind != "user_defined", normalized=False) for p in pieces if p.kind in kinds]
    )


def vocabulary(texts: Sequence[str], path: Path) -> dict[str, int]:
    """Token -> id. Raises ConvertError if a token appears twice, or if their lengths would make merges endless."""
    if sum(len(text) ** 2 for text in texts) > MOST_CUTS:
        raise ConvertError(f"the vocabulary has tokens of up to {max(map(len, texts))} characters: not believed", path)
    vocab = {text: index for index, text in enumerate(texts)}
    if len(vocab) != len(texts):
        twice = next(text for index, text in enumerate(texts) if vocab[text] != index)
        raise ConvertError(f"token {twice!r} appears twice in the vocabulary", path)
    return vocab


def bpe(path: Path, **parts: Any) -> BPE:
    """The library's model; merges that leave the vocabulary raise ConvertError."""
    try:
        return BPE(**parts)
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"tokenizer: {error}", path) from error
