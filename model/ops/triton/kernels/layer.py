"""Device code of a decoder layer's small steps: norm, rotation and KV write, activation, page copies.

Knows no launches. Arithmetic is in fp32 and is rounded to the tensors' dtype where model/ops/reference.py rounds it.
Legend: T tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, d head_dim, n rotary width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.ops.triton.kernels.dialect import rounded

TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small fp32 leaves no bit below one, ties to even


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """Program: one row. Without ADDS, x is the sum already."""
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + channel
    dtype: tl.constexpr = out.dtype.element_ty
    wide = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if ADDS:
        sums = rounded(wide + tl.load(residual + at, mask=inside, other=0).to(tl.float32), dtype)
        tl.store(total + at, sums, mask=inside)
        wide = sums.to(tl.float32)
    scaled = rounded(wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps), dtype).to(tl.float32)
    gain = tl.load(weight + channel, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, rounded(gain * scaled, dtype), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, rounded(gate / (1 + tl.exp(-gate)) * up, out.dtype.element_ty), mask=inside)


@triton.jit
def copy_pages_kernel(k, v, src, dst, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair of pages, block): a page with all its heads and scales is one run of ELEMENTS."""
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < ELEMENTS
    source = tl.load(src + tl.program_id(0)).to(tl.int64) * ELEMENTS + element
    target = tl.load(dst + tl.program_id(0)).to(tl.int64) * ELEMENTS + element
    tl.store(k + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(v + target, tl.load(v + source, mask=inside), mask=inside)


@triton.jit
def magnitude(x):
    """The largest of the last axis, NaN if one is."""
    return tl.where(tl.max((x != x).to(tl.int32), -1) > 0, float("nan"), tl.max(tl.abs(x), -1))


@triton.jit
def scale_of(largest, CACHE: tl.constexpr):
    """What one step of a row means; NaN and inf stay."""
    return tl.div_rn(largest, tl.zeros_like(largest) + (127.0 if CACHE == "int8" else 448.0))


@triton.jit
def stored(x, scale, CACHE: tl.constexpr):
    """x / scale as int8, or as the bits of e4m3, to nearest even; 0 where the scale is 0, NaN or inf."""
    if CACHE == "":
        return x
    else:
        limit: tl.constexpr = 127.0 if CACHE == "int8" else 448.0
        steps = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
        steps = tl.minimum(tl.maximum(tl.where(steps == steps, steps, 0.0), -limit), limit)
        if CACHE == "int8":
            return ((steps + TO_INTEGER) - TO_INTEGER).to(tl.int8)
        else:
            size = tl.abs(steps)
            bits = size.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # three bits of fraction, bias 7
            tiny = ((size * 512 + TO_INTEGER) - TO_INTEGER).to(tl.int32)
            return (tl.where(size < 0.015625, tiny, normal) + tl.where(steps < 0, 128, 0)).to(tl.uint8)


@triton.jit
def load_heads(heads, pair, rest, held, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of pointers to heads: both members of each pair, and the channels that are not turned; fp32."""
    a = tl.load(heads + pair, mask=held & (pair < HALF), other=0).to(tl.float32)
    b = tl.load(heads + pair + HALF, mask=held & (pair < HALF), other=0).to(tl.float32)
    c = tl.load(heads + rest, mask=held & (rest < HEAD_DIM), other=0).to(tl.float32)
    return a, b, c


@triton.jit
def store_heads(heads, parts, pair, rest, held, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The reverse of load_heads."""
    a, b, c = parts
    tl.store(heads + pair, a, mask=held & (pair < HALF))
    tl.store(heads + pair + HALF, b, mask=held & (pair < HALF))
    tl.store(heads + rest, c, mask=held & (rest < HEAD_DIM))


@triton.jit
def write_value(source, values, scales, HEAD_DIM: tl.constexpr, D: tl.constexpr, CACHE: tl.constexpr):
    """One head's value as it came to its slot, with its scale."""
    channel = tl.arange(0, D)
    value = tl.load(source + channel, mask=channel < HEAD_DIM, other=0)
    scale = 1.0
    if CACHE != "":
        scale = scale_of(magnitude(value.to(tl.float32)), CACHE)
        tl.store(scales, scale)
    tl.store(values + channel, stored(value, scale, CACHE), mask=channel < HEAD_DIM)


@triton.jit
def rope_write_kernel(
    qkv,  # [T, (Hq + 2 Hkv) * d]
    q_norm,
    k_norm,
    cos_sin,  # [positions, n] f32
    positions,
    slots,
    k,
    v,
    k_scale,
    v_scale,
    q,  # [T, Hq, d]
    eps,
    page_stride,
    head_stride,
    token_stride,
    scale_page_stride,
    scale_head_stride,
    CACHE: tl.constexpr,
    NORMED: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # G + 1, padded
    PAIRS: tl.constexpr,  # n / 2, padded
    REST: tl.constexpr,  # d - n, padded
    D: tl.constexpr,  # d, padded
):
    """Program (token, KV head): its G query heads and its key as the rows of one tile, its value beside them."""
    token, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    dtype: tl.constexpr = q.dtype.element_ty
    source = qkv + token * ((G + 2) * kv_heads * HEAD_DIM)
    row = tl.arange(0, ROWS)[:, None]
    head = tl.where(row < G, kv_head * G + row, kv_heads * G + kv_head)
    pair = tl.arange(0, PAIRS)[None, :]
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    a, b, c = load_heads(source + head * HEAD_DIM, pair, rest, row <= G, HALF, HEAD_DIM)
    if NORMED:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        weights = load_heads(tl.where(row < G, q_norm, k_norm), pair, rest, row <= G, HALF, HEAD_DIM)
        a = rounded(rounded(a * factor, dtype).to(tl.float32) * weights[0], dtype).to(tl.float32)
        b = rounded(rounded(b * factor, dtype).to(tl.float32) * weights[1], dtype).to(tl.float32)
        c = rounded(c * factor, dtype).to(tl.float32) * weights[2]
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(angles + pair, mask=pair < HALF, other=0)
    sin = tl.load(angles + HALF + pair, mask=pair < HALF, other=0)
    a, b, c = rounded(a * cos - b * sin, dtype), rounded(b * cos + a * sin, dtype), rounded(c, dtype)
    queries = q + token * (G * kv_heads * HEAD_DIM) + head * HEAD_DIM
    store_heads(queries, (a, b, c), pair, rest, row < G, HALF, HEAD_DIM)
    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // PAGE, slot % PAGE
    at = page * page_stride + kv_head * head_stride + offset * token_stride
    scale_at = page * scale_page_stride + kv_head * scale_head_stride + offset
    scale = 1.0
    if CACHE != "":
        largest = tl.maximum(magnitude(a.to(tl.float32)), magnitude(b.to(tl.float32)), tl.PropagateNan.ALL)
        largest = tl.maximum(largest, magnitude(c.to(tl.float32)), tl.PropagateNan.ALL)
        scale = scale_of(largest, CACHE)[:, None]
        tl.store(k_scale + scale_at + 0 * row, scale, mask=row == G)
    keys = stored(a, scale, CACHE), stored(b, scale, CACHE), stored(c, scale, CACHE)
    store_heads(k + at + 0 * row, keys, pair, rest, row == G, HALF, HEAD_DIM)
    value = source + ((G + 1) * kv_heads + kv_head) * HEAD_DIM
    write_value(value, v + at, v_scale + scale_at, HEAD_DIM, D, CACHE)
