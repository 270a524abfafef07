"""Philox4x32-10 (Salmon et al., 2011) on int64 tensors: random numbers that are a function of their key and counter.

Knows no sampling. Words are 32-bit values kept in int64; products are split so that nothing leaves int64, and a GPU
kernel repeats them with plain 32-bit arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words from a counter of four and a key of two (each i64, 0 to 2^32 - 1, any one shape)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """One f64 in (0, 1) a row: (word 0 + 1/2) / 2^32, of key = seed (64 bits) and counter = (index, choice, 0, 0)."""
    zero = torch.zeros_like(seed)
    counter = (index.long() & WORD, choice.long() & WORD, zero, zero)
    word = philox(counter, (seed & WORD, (seed >> 32) & WORD))[0]
    return (word.double() + 0.5) / 2.0**32


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 by 32 bit product."""
    low = word * (factor & 0xFFFF)  # below 2^48
    high = word * (factor >> 16) + (low >> 16)  # in units of 2^16
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
