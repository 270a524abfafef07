"""Whether sentencepiece's precompiled normaliser is sound: the library that runs it trusts every number in it.

Knows nothing of tokenizers. The format: the bytes of a double-array trie, the trie, then texts that end with a zero.
"""

from __future__ import annotations

import numpy as np

LABEL_OR_VALUE = 0x800000FF  # a unit with the top bit is a value, else its lowest byte is the label of its edge


def is_sound(raw: bytes) -> bool:
    """True if no walk from the root leaves the trie and every value points to the start of a character."""
    size = int.from_bytes(raw[:4], "little")
    if not 1024 <= size <= len(raw) - 4 or size % 1024:
        return False
    units = np.frombuffer(raw, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(raw, np.uint8, offset=4 + size)
    offsets = (units >> 10) << ((units & 512) >> 6)
    labels = np.arange(1, 256)
    seen = np.zeros(len(units), bool)
    frontier = np.zeros(1, np.int64)
    while len(frontier):
        seen[frontier] = True
        bases = frontier ^ offsets[frontier]
        if (bases | 255).max() >= len(units):
            return False
        values = units[bases[(units[frontier] & 256) != 0]] & 0x7FFFFFFF
        if (values >= len(texts)).any() or ((texts[values] & 0xC0) == 0x80).any():
            return False
        children = bases[:, None] ^ labels
        reached = np.unique(children[(units[children] & LABEL_OR_VALUE) == labels])
        frontier = reached[~seen[reached]]
    return True
