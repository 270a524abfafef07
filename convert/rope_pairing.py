"""Which channels RoPE rotates together: the index map from adjacent to split-half pairs, and the test that detects it.

Knows nothing of formats: rows of heads in, rows of heads out. Adjacent pairs are channels (2i, 2i + 1), split-half
pairs are (i, i + n/2) for rotary width n. The map applies to everything indexed by an output row of Q or K: weights,
biases, per-row scales, QK-norm weights (one head), LoRA B; to nothing else.

Legend: H query heads, K key heads, D head_dim, d hidden size, n rotary width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Array, Float32

Pairing = Literal["adjacent", "split_half"]
Verdict = Literal["confirmed", "contradicted", "undetermined"]

CLEAR_Z = 8.0  # below it a verdict is noise: random weights stay under 1, real ones reach 20 to 100
CLEAR_RATIO = 3.0
MATCHINGS = 300


def split_half_order(heads: int, head_dim: int, rotary: int) -> NDArray[np.intp]:
    """Row order that turns adjacent rows into split-half rows: new = old[order]. int64 [heads * head_dim]."""
    within = np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2), np.arange(rotary, head_dim)])
    order: NDArray[np.intp] = np.arange(heads)[:, None] * head_dim + within[None, :]
    return order.reshape(-1)


def to_split_half(rows: Array, heads: int, rotary: int | None = None) -> Array:
    """Adjacent to split-half along axis 0 of [heads * D, ...]. Values are moved, never changed."""
    head_dim = rows.shape[0] // heads
    return rows[split_half_order(heads, head_dim, rotary or head_dim)]


def to_adjacent(rows: Array, heads: int, rotary: int | None = None) -> Array:
    """The inverse of `to_split_half`."""
    head_dim = rows.shape[0] // heads
    return rows[np.argsort(split_half_order(heads, head_dim, rotary or head_dim))]


@dataclass(frozen=True, slots=True)
class PairingEvidence:
    """What the weights say. t is 1 where pairs are no stronger than chance; z: its distance in standard deviations."""

    expected: Pairing
    verdict: Verdict
    layers: int
    adjacent_t: float
    adjacent_z: float
    split_half_t: float
    split_half_z: float

    def line(self) -> str:
        """The evidence in one line, for people."""
        return (
            f"{self.verdict} (expected {self.expected}; adjacent T {self.adjacent_t:.2f} z {self.adjacent_z:+.1f}, "
            f"split-half T {self.split_half_t:.2f} z {self.split_half_z:+.1f}, {self.layers} layers)"
        )


def coupling(query: Float32, key: Float32, heads: int, kv_heads: int) -> Float32:
    """How strongly channels i and j of a head couple through Q and K: [H, D, D], symmetric, off-diagonal mean 1.

    query [H * D, d] and key [K * D, d] with the preceding norm's weight folded in.
    """
    head_dim = query.shape[0] // heads
    unit = [w / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-12) for w in (query, key)]
    q = unit[0].reshape(heads, head_dim, -1)
    k = unit[1].reshape(kv_heads, head_dim, -1).repeat(heads // kv_heads, axis=0)
    square = np.matmul(q, k.transpose(0, 2, 1)) ** 2
    square = square + square.transpose(0, 2, 1)
    off_diagonal = (square.sum((1, 2)) - np.trace(square, axis1=1, axis2=2)) / (head_dim * (head_dim - 1))
    return np.asarray(square / np.maximum(off_diagonal, 1e-30)[:, None, None], np.float32)


def detect_pairing(
    layers: Iterable[tuple[Float32, Float32]], heads: int, kv_heads: int, rotary: int, expected: Pairing
) -> PairingEvidence:
    """Judge `expected` from the weights alone; layers yields (query, key) as for `coupling`. No text, no forward.

    RoPE can mix only the two channels of a pair, so training leaves Q-K cross terms inside true pairs.
    Blind spots: random weights (undetermined); Q and K both permuted as if they were one head (looks split-half: the
    comparison of logits catches that one); tiny head_dim and layers without RoPE weaken z.
    """
    total, count = np.zeros((rotary, rotary)), 0
    for query, key in layers:
        total += coupling(query, key, heads, kv_heads)[:, :rotary, :rotary].mean(0)
        count += 1
    strength = total / max(count, 1)
    half = rotary // 2
    evens, firsts = np.arange(0, rotary, 2), np.arange(half)
    shuffles = np.random.default_rng(0).permuted(np.tile(np.arange(rotary), (MATCHINGS, 1)), axis=1)
    chance = strength[shuffles[:, :half], shuffles[:, half:]].mean(1)
    t = (float(strength[evens, evens + 1].mean()), float(strength[firsts, firsts + half].mean()))
    z = tuple((value - chance.mean()) / max(float(chance.std()), 1e-9) for value in t)
    return PairingEvidence(expected, _verdict(z[0], z[1], expected), count, t[0], float(z[0]), t[1], float(z[1]))


def _verdict(adjacent_z: float, split_half_z: float, expected: Pairing) -> Verdict:
    best, other = max(adjacent_z, split_half_z), min(adjacent_z, split_half_z)
    if best < CLEAR_Z or best < CLEAR_RATIO * other:
        return "undetermined"
    seen = "adjacent" if adjacent_z > split_half_z else "split_half"
    return "confirmed" if seen == expected else "contradicted"
