"""Every operation in plain torch: the oracle of the other backends, and what serves where there is no faster one.

Knows no device and no model. A row's result depends on that row alone, bit for bit; so silu is
spelled with exp, which rounds alike in vector lanes and scalar tails where torch's own silu and sigmoid do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.ops.interface import AttentionTables, LayerKV, PackedLinear
from model.ops.quantised_kv import quantise
from model.ops.reference_attention import paged_attention
from model.ops.reference_linear import PlainLinear, ReorderedLinear, pack
from model.ops.reference_sampling import sample


class ReferenceOps:
    """The Ops protocol; see model/ops/interface.py for the meaning of every operation."""

    name = "reference"

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, quantization: str | None = None
    ) -> PlainLinear | ReorderedLinear:
        if quantization is not None:
            raise ValueError(f"quantization {quantization!r} needs native kernels; the reference operations have none")
        return pack(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        assert isinstance(packed, PlainLinear | ReorderedLinear)
        return packed(x, x.dtype if out_dtype is None else out_dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return rms_norm(total, weight, eps), total

    def rope_write(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
    ) -> Tensor:
        kv_heads, head_dim = kv.k.shape[1], kv.k.shape[3]
        heads = qkv.view(qkv.shape[0], -1, head_dim)  # [T, Hq + 2 Hkv, d]
        q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, norm_eps), rms_norm(k, k_norm, norm_eps)
        rows = cos_sin.index_select(0, positions).unsqueeze(1)  # [T, 1, n]
        _write(kv.k, kv.k_scale, slots, rotate(k, rows))
        _write(kv.v, kv.v_scale, slots, v)
        return rotate(q, rows)

    def attention(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        return paged_attention(q, kv, tables, scale, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def copy_pages(self, kv: LayerKV, src: Tensor, dst: Tensor) -> None:
        for pages in (kv.k, kv.v, kv.k_scale, kv.v_scale):
            if pages is not None:
                pages[dst] = pages[src]

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        return sample(logits, batch)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> x's dtype; the mean square in fp32."""
    wide = x.float()
    scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """heads [T, H, d], cos_sin [T, 1, n]: turn pairs (i, i + n/2) of the first n channels, in fp32."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second, rest = torch.split(heads, [half, half, heads.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _write(cache: Tensor, scale: Tensor | None, slots: Tensor, heads: Tensor) -> None:
    """cache [pages, Hkv, page_size, d], scale [pages, Hkv, page_size]; heads [T, Hkv, d] go to slots [T]."""
    _, kv_heads, page_size, head_dim = cache.shape
    page, offset = torch.div(slots, page_size, rounding_mode="floor"), slots % page_size
    if scale is not None:
        cache[page, :, offset], scale[page, :, offset] = quantise(heads, cache.dtype)
        return
    head = torch.arange(kv_heads, device=slots.device)
    row = (page.unsqueeze(1) * kv_heads + head) * page_size + offset.unsqueeze(1)  # [T, Hkv]
    cache.view(-1, head_dim).index_copy_(0, row.flatten(), heads.to(cache.dtype).reshape(-1, head_dim))
