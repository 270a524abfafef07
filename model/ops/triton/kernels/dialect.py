"""What all kernels share: whether they run in Triton's interpreter, and the few places where that must differ.

Knows no operation. The interpreter (TRITON_INTERPRET=1, set before the first import) runs kernels on CPU tensors. It
computes wrongly with bf16, cuts bf16 off instead of rounding, and multiplies matrices with a library whose rows depend
on their place; so products run in fp64 there, and bf16 is rounded by hand.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def add_product(acc, left, right):
    """acc [M, N] f32 + left [M, K] @ right [K, N]; fp32 operands are not shortened."""
    if INTERPRETED:
        return acc + tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)
    else:
        return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x f32 -> dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Small integers, or what has the dtype already, to dtype."""
    if INTERPRETED:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)
