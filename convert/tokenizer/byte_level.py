"""Vocabularies of ranked byte strings (tiktoken, tekken) to byte-level BPE.

Knows nothing of file formats. A rank is both the age of a token and its priority: of two possible merges the lower rank
wins, and a piece of text that is a token as a whole is that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

from convert.errors import ConvertError
from convert.tokenizer.sentencepiece import bpe, vocabulary


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte: bytes that print keep theirs, the others move up from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + moved.index(byte)) for byte in range(256)]


def ranked_tokenizer(
    ranks: Sequence[bytes], specials: Sequence[str], specials_first: bool, pattern: str, path: Path
) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and the text of every id. specials_first: special tokens take the lowest ids."""
    alphabet = byte_alphabet()
    texts = ["".join(alphabet[byte] for byte in token) for token in ranks]
    everything = [*specials, *texts] if specials_first else [*texts, *specials]
    vocab = vocabulary(everything, path)
    tokenizer = Tokenizer(bpe(path, vocab=vocab, merges=merges_of_ranks(texts), ignore_merges=True))
    split = pre_tokenizers.Split(regex(pattern, path), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer, everything


def regex(pattern: str, path: Path) -> Regex:
    """Raises ConvertError for a pattern that is none."""
    try:
        return Regex(pattern)
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"pattern {pattern[:60]!r}: {error}", path) from error


def merges_of_ranks(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens, in the order of the whole's rank, then of the parts' ranks."""
    rank = {text: index for index, text in enumerate(texts)}
    merges = []
    for text in texts:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in rank and text[cut:] in rank]
        merges += sorted(cuts, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges
