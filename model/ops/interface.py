"""What a device must bring: the operations of a decoder layer and of sampling, as one protocol.

Nothing here knows a model or a request. One rule binds every implementation: a row's result depends on that row alone
(not on the number of rows, their order, threads, or how a prompt was cut into chunks).
Legend: T tokens, Hq query heads, Hkv key/value heads, d head_dim, n rotary width, K in, N out, B sequences, R rows,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled

KV_CUT = 64
"""Attention cuts keys at multiples of this many tokens, on every device, for decode and prefill alike."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The cache of one layer: views into its group's pool. Page layout is head-major.

    A quantised cache (int8, float8_e4m3fn) has a scale beside each key and value of each head, in the same page: rows
    mean k * k_scale. There the views are strided, since the scales of a page follow its values.
    """

    k: Tensor  # [num_pages, Hkv, page_size, d]
    v: Tensor  # [num_pages, Hkv, page_size, d]
    k_scale: Tensor | None = None  # [num_pages, Hkv, page_size] f32
    v_scale: Tensor | None = None  # [num_pages, Hkv, page_size] f32

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Where each sequence's keys live and which rows ask."""

    page_table: Tensor  # [B, P] i32
    kv_lens: Tensor  # [B] i32
    q_starts: Tensor  # [B + 1] i32
    max_q: int
    max_kv: int


class PackedLinear(Protocol):
    """Weights in the layout a backend reads fastest. Opaque but for its logical shape and its size."""

    @property
    def out_features(self) -> int:
        """Columns of the product."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory, bias and scales included."""

    def shares(self, tensor: Tensor) -> bool:
        """Whether this reads the very memory of tensor (a tied head may), so that its bytes must not count twice."""
        ...


class Ops(Protocol):
    """The operations. Inputs are contiguous unless said otherwise; outputs are new tensors."""

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear:
        """weight [N, K], bias [N]; the originals may be dropped afterwards."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype unless out_dtype is given (the head asks for fp32)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """s = x + residual (or x); returns (s / sqrt(mean(s^2) + eps) * weight, s). The mean square is fp32."""
        ...

    def rope_write(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hkv) * d]
        q_norm: Tensor | None,  # [d] per-head RMSNorm weight, or None
        k_norm: Tensor | None,
        norm_eps: float,
        cos_sin: Tensor,  # [max_position, n] f32: n/2 cosines, then n/2 sines
        positions: Tensor,  # [T]
        slots: Tensor,  # [T]
        kv: LayerKV,
    ) -> Tensor:
        """Rotate q and k (split-half pairs over the first n of d), write k and v to their slots; q [T, Hq, d].

        A quantised cache gets the rows in qkv's dtype, quantised as model/ops/quantised_kv.py does.
        """
        ...

    def attention(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        """q [T, Hq, d] -> [T, Hq * d]. Causal by position; window W lets position i see (i - W, i].

        A quantised cache is read as fp32: value * scale.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]: silu(first half) * second half."""
        ...

    def copy_pages(self, kv: LayerKV, src: Tensor, dst: Tensor) -> None:
        """Copy whole pages with their scales, src [N] to dst [N]."""
        ...

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        """logits [R, V] f32 (may be overwritten) -> one token a row; temperature 0 takes the lowest best id."""
        ...
