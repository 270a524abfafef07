"""Device code of the matrix product whose rows do not depend on their number.

Knows one tile: the same for every number of rows, so that a row goes through the same instructions in the same order
over K, alone or among thousands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.ops.triton.kernels.dialect import add_product, rounded

BAND = tl.constexpr(8)  # row tiles that share a sweep over the weights, for the cache's sake


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,  # [rows, K]
    weight,  # [N, K]
    bias,  # [N]
    out,  # [rows, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program: one tile of the product. Sums in fp32, K in ascending order."""
    program = tl.program_id(0)
    tall, wide = tl.cdiv(rows, ROWS), tl.cdiv(N, COLUMNS)
    band = program // (BAND * wide)
    height = tl.minimum(tall - band * BAND, BAND)
    in_band = program % (BAND * wide)
    row = (band * BAND + in_band % height) * ROWS + tl.arange(0, ROWS)
    column = in_band // height * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        left = tl.load(
            x + row[:, None].to(tl.int64) * K + depth[None, :],
            mask=(row < rows)[:, None] & (depth < K)[None, :],
            other=0,
        )
        right = tl.load(
            weight + column[:, None].to(tl.int64) * K + depth[None, :],
            mask=(column < N)[:, None] & (depth < K)[None, :],
            other=0,
        )
        acc = add_product(acc, left, tl.trans(right))
    if BIASED:
        acc += tl.load(bias + column, mask=column < N, other=0).to(tl.float32)[None, :]
    at = row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + at, rounded(acc, out.dtype.element_ty), mask=(row < rows)[:, None] & (column < N)[None, :])
