"""Device code around a product of 8-bit rows: rounding the rows before it, and scaling integer sums after it.

Knows no launches; rounds as the kernels of an 8-bit KV cache do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.ops.triton.kernels.dialect import rounded
from model.ops.triton.kernels.layer import magnitude, scale_of, stored


@triton.jit
def round_rows_kernel(
    x,  # [T, WIDTH]
    codes,  # [T or more, PADDED]
    scales,  # [T] f32
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program: one row; what lies behind its width becomes zero."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wide = tl.load(x + row * WIDTH + channel, mask=channel < WIDTH, other=0).to(tl.float32)
    scale = scale_of(magnitude(wide), KIND)
    tl.store(scales + row, scale)
    tl.store(codes + row * PADDED + channel, stored(wide, scale, KIND), mask=channel < PADDED)


@triton.jit
def rescale_kernel(
    sums,  # [T or more, PITCH] i32 or f32
    row_scale,  # [T] f32
    scale,  # [PITCH] f32
    bias,  # [PITCH]
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(sums + row * PITCH + column, mask=inside, other=0).to(tl.float32)
    wide = wide * tl.load(row_scale + row) * tl.load(scale + column, mask=inside, other=0)
    if BIASED:
        wide += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, rounded(wide, out.dtype.element_ty), mask=inside)
