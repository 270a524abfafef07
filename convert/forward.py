"""Logits of a decoder in plain numpy, one layer's weights in memory at a time: for comparing two readings of a model.

Knows nothing of files or names: a `Reading` answers with weights by role. Slow and simple on purpose.
Legend: T tokens, H query heads, K key/value heads, D head_dim, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Float32
from convert.reading_windows import Windows

OnLayer = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the forward needs to know beside weights. inverse_frequencies: fp64 [n / 2]; rope_scale: on cos and sin.

    far_frequencies: those of contexts over the original one where they are others; no forward here is that long.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: Windows
    inverse_frequencies: NDArray[np.float64]
    rope_scale: float
    far_frequencies: NDArray[np.float64] | None = None


class Reading(Protocol):
    """One way of reading a checkpoint."""

    @property
    def dimensions(self) -> Dimensions: ...

    def weight(self, role: str, layer: int | None = None) -> Float32:
        """fp32, [out, in] for matrices. Roles: embed, norm, head; of a layer: attn_norm, q, k, v, o, mlp_norm, ..."""

    def optional(self, role: str, layer: int) -> Float32 | None:
        """q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, gate_bias, up_bias, down_bias where the model has them."""

    def rotate(self, x: Float32, cos: Float32, sin: Float32) -> Float32:
        """RoPE on x [T, heads, D] with cos, sin [T, 1, n / 2], in this reading's pairing."""


def logits(reading: Reading, ids: Sequence[int], on_layer: OnLayer = lambda: None) -> Float32:
    """fp32 [T, V] for the tokens `ids` from position 0. on_layer is called after each layer: it is slow work."""
    dims = reading.dimensions
    x = reading.weight("embed")[np.asarray(ids)]
    angles = np.arange(len(ids))[:, None, None] * dims.inverse_frequencies[None, None, :]
    cos = (np.cos(angles) * dims.rope_scale).astype(np.float32)
    sin = (np.sin(angles) * dims.rope_scale).astype(np.float32)
    for layer in range(dims.layers):
        x = x + _attention(reading, layer, _norm(x, reading.weight("attn_norm", layer), dims.eps), cos, sin)
        x = x + _mlp(reading, layer, _norm(x, reading.weight("mlp_norm", layer), dims.eps))
        on_layer()
    return _norm(x, reading.weight("norm"), dims.eps) @ reading.weight("head").T


def _norm(x: Float32, weight: Float32, eps: float) -> Float32:
    scale: Float32 = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
    return x / scale * weight


def _linear(reading: Reading, role: str, layer: int, x: Float32) -> Float32:
    y = x @ reading.weight(role, layer).T
    bias = reading.optional(f"{role}_bias", layer)
    return y if bias is None else y + bias


def _mlp(reading: Reading, layer: int, x: Float32) -> Float32:
    gate = _linear(reading, "gate", layer, x)
    gate = gate / (1 + np.exp(-np.clip(gate, -80, 80)))
    return _linear(reading, "down", layer, gate * _linear(reading, "up", layer, x))


def _attention(reading: Reading, layer: int, x: Float32, cos: Float32, sin: Float32) -> Float32:
    dims, steps = reading.dimensions, len(x)
    q = _heads(reading, "q", layer, x, dims.heads)
    k = _heads(reading, "k", layer, x, dims.kv_heads)
    v = _linear(reading, "v", layer, x).reshape(steps, dims.kv_heads, dims.head_dim)
    q, k = reading.rotate(q, cos, sin), reading.rotate(k, cos, sin)
    k, v = (part.repeat(dims.heads // dims.kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.float32(np.sqrt(dims.head_dim))
    distance = np.arange(steps)[:, None] - np.arange(steps)[None, :]
    visible = (distance >= 0) & (distance < (dims.windows[layer] or steps))
    scores = np.where(visible, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return _linear(reading, "o", layer, np.einsum("hts,shd->thd", weights, v).reshape(steps, -1))


def _heads(reading: Reading, role: str, layer: int, x: Float32, heads: int) -> Float32:
    y = _linear(reading, role, layer, x).reshape(len(x), heads, -1)
    norm = reading.optional(f"{role}_norm", layer)
    return y if norm is None else _norm(y, norm, reading.dimensions.eps)
