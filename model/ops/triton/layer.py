"""Launches of a decoder layer's small steps.

Knows shapes, no device code. Block sizes follow from the width alone: a row never depends on how many rows there are.
Legend: T tokens, Hq query heads, Hkv KV heads, d head_dim, n rotary width, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from model.ops.interface import LayerKV
from model.ops.triton import cache
from model.ops.triton.kernels.layer import add_rms_norm_kernel, copy_pages_kernel, rope_write_kernel, silu_mul_kernel

BLOCK = 1024


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, D] -> (normed, sum), both [T, D]."""
    rows, width = x.shape
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_rms_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, out, total, eps, WIDTH=width, BLOCK=block,
        ADDS=residual is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F] -> [T, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=4)
    return out


def copy_pages(kv: LayerKV, src: Tensor, dst: Tensor) -> None:
    """Pages src [N] to dst [N]; no page is in both."""
    k, v, _, _ = cache.pointers(kv)
    elements = k.stride(0)  # the scales of a page lie behind its values
    grid = (src.shape[0], triton.cdiv(elements, 4 * BLOCK))
    copy_pages_kernel[grid](k, v, src, dst, ELEMENTS=elements, BLOCK=4 * BLOCK, num_warps=8)


def rope_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: LayerKV,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * d] -> q [T, Hq, d]; see model/ops/interface.py."""
    _, kv_heads, page_size, head_dim = kv.k.shape
    group = qkv.shape[1] // (head_dim * kv_heads) - 2
    q = qkv.new_empty(qkv.shape[0], group * kv_heads, head_dim)
    half = cos_sin.shape[1] // 2
    normed = q_norm is not None and k_norm is not None
    rope_write_kernel[(qkv.shape[0], kv_heads)](
        qkv, q_norm if normed else qkv, k_norm if normed else qkv, cos_sin, positions, slots, *cache.pointers(kv), q,
        norm_eps, *cache.strides(kv), CACHE=cache.kind(kv), NORMED=normed, G=group, HEAD_DIM=head_dim, HALF=half,
        PAGE=page_size, ROWS=triton.next_power_of_2(group + 1), PAIRS=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(max(1, head_dim - 2 * half)), D=triton.next_power_of_2(head_dim),
        num_warps=1 if group < 4 else 2,
    )  # fmt: skip
    return q
