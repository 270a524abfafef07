"""Device code of paged attention's inside: the loop over tiles of keys, and what it leaves.

Knows page tables and strides, not which programs there are. Rows of a tile are the query heads of one KV head (times
tokens, in prefill), so that a key is read once for all of them. Softmax is in base 2 and fp32. A state is (weighted
values, maximum, sum of weights); an invisible tile or split changes no bit of it.
Legend: M rows of a tile, N keys of a tile, D channels padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.ops.triton.kernels.dialect import add_product, rounded, widened

LOWEST = tl.constexpr(-3.0e38)  # the maximum of nothing; finite, so that no difference of maxima is NaN


@triton.jit
def cached_values(stored, dtype: tl.constexpr, CACHE: tl.constexpr):
    """A tile of the cache in the dtype of the product. e4m3 comes as its bits; read as fp16 they mean 1/256 of it."""
    if CACHE == "fp8":
        bits = stored.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return widened(stored, dtype)


@triton.jit
def cached_scales(scale, mask, CACHE: tl.constexpr):
    """Scales that belong to cached_values."""
    loaded = tl.load(scale, mask=mask, other=0)
    if CACHE == "fp8":
        loaded = loaded * 256
    return loaded


@triton.jit
def nothing(M: tl.constexpr, D: tl.constexpr):
    """The state of no keys."""
    return tl.zeros([M, D], tl.float32), tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def attend(
    state,
    q,  # [M, D]
    newest,  # [M] i32: the last position that a row sees; -1: none
    first,  # keys below are dead for every row
    lo,  # a multiple of N
    hi,
    cache,  # pointers at the KV head and at the sequence's page ids, then strides
    qk_scale,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The state after keys lo to hi as well. Not MASKED: every row sees all of them, and they fill whole tiles."""
    acc, top, total = state
    k, v, k_scale, v_scale, pages, page_stride, token_stride, scale_stride = cache
    product: tl.constexpr = tl.bfloat16 if CACHE != "" and q.dtype == tl.float16 else q.dtype  # small scales underflow
    channel = tl.arange(0, q.shape[1])[None, :]
    for start in range(lo, hi, N):
        position = start + tl.arange(0, N)
        held = (position >= first) & (position < hi) if MASKED else position >= 0
        page = tl.load(pages + position // PAGE, mask=held, other=0).to(tl.int64)
        offset = position % PAGE
        at = (page * page_stride + offset * token_stride)[:, None] + channel
        wanted = held[:, None] & (channel < HEAD_DIM)
        keys = cached_values(tl.load(k + at, mask=wanted, other=0), q.dtype, CACHE)
        scores = add_product(tl.zeros([q.shape[0], N], tl.float32), q, tl.trans(keys)) * qk_scale
        if CACHE != "":
            scores = scores * cached_scales(k_scale + page * scale_stride + offset, held, CACHE)[None, :]
        if MASKED:
            seen = position[None, :] <= newest[:, None]
            if WINDOW:
                seen = seen & (position[None, :] > newest[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = tl.fma(total, keep, tl.sum(weights, 1))
        if CACHE != "":
            weights = weights * cached_scales(v_scale + page * scale_stride + offset, held, CACHE)[None, :]
            if MASKED:
                weights = tl.where(seen, weights, 0.0)  # the scale of an unseen value may be NaN
        values = cached_values(tl.load(v + at, mask=wanted, other=0), product, CACHE)
        acc = add_product(acc * keep[:, None], rounded(weights, product), values)
        top = higher
    return acc, top, total


@triton.jit
def fold(state, more):
    """One state of two, the second behind the first. Spelled in fma, so that it rounds alike wherever it is inlined."""
    acc, top, total = state
    more_acc, more_top, more_total = more
    higher = tl.maximum(top, more_top)
    keep = tl.exp2(top - higher)
    weight = tl.exp2(more_top - higher)
    acc = tl.fma(acc, tl.expand_dims(keep, -1), more_acc * tl.expand_dims(weight, -1))
    return acc, higher, tl.fma(total, keep, more_total * weight)


@triton.jit
def cut(first, end, splits, N: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr):
    """How keys first to end are split: where the first split begins, the length of each, their number.

    SPLIT > 0: at multiples of SPLIT. SPLIT = 0: into at most `splits` equal parts of at least LEAST.
    """
    if SPLIT:
        begin = first // SPLIT * SPLIT
        length = tl.zeros_like(begin) + SPLIT
    else:
        begin = first // N * N
        length = tl.maximum(tl.cdiv(tl.cdiv(end - begin, splits), N) * N, LEAST)
    return begin, length, tl.cdiv(end - begin, length)


@triton.jit
def attend_by_splits(
    q,
    newest,
    first,
    end,
    cache,
    qk_scale,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The state over keys first to end, each split computed apart and folded in index order."""
    M: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    acc, top, total = nothing(M, D)
    for begin in range(first // SPLIT * SPLIT, end, SPLIT):
        lo, hi = tl.maximum(begin, first // N * N), tl.minimum(begin + SPLIT, end)
        more = attend(
            nothing(M, D), q, newest, first, lo, hi, cache, qk_scale, CACHE, WINDOW, HEAD_DIM, N, PAGE, True
        )  # fmt: skip
        acc, top, total = fold((acc, top, total), more)
    return acc, top, total
