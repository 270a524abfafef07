"""Device code of paged attention's programs: one that decodes, the merge behind it, and one that prefills.

Knows how rows map to sequences and heads; what happens to a tile of them is in attend.py.
Legend: T tokens, B sequences, Hq query heads, d head_dim, M rows of a tile, N keys of a tile, D channels padded to a
power of two, G query heads of a KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from model.ops.triton.kernels.attend import LOWEST, attend, attend_by_splits, cut, fold, nothing
from model.ops.triton.kernels.dialect import rounded


@triton.jit(
    do_not_specialize=["splits", "slots", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "q_starts"],
)
def decode_kernel(
    q,  # [T, Hq, d]
    k,
    v,
    k_scale,
    v_scale,
    page_table,
    kv_lens,
    q_starts,
    out,  # [T, Hq * d]
    parts,  # [B, Hq, slots, d] f32
    marks,  # [B, Hq, slots, 2] f32: maximum, sum
    qk_scale,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    scale_page_stride,
    scale_head_stride,
    splits,
    slots,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Program (sequence, KV head, split): the query heads of one token. IN_PLACE: one program owns all splits.

    Sequences with another number of tokens than one belong to prefill_kernel.
    """
    sequence, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(q_starts + sequence)
    if tl.load(q_starts + sequence + 1) - row != 1:
        return
    length = tl.load(kv_lens + sequence)
    heads = tl.num_programs(1) * G
    head = kv_head * G + tl.arange(0, M)
    channel = tl.arange(0, D)
    is_row = tl.arange(0, M) < G
    wanted = is_row[:, None] & (channel < HEAD_DIM)[None, :]
    at = (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + channel[None, :]
    queries = tl.load(q + at, mask=wanted, other=0)
    newest = tl.where(is_row, length - 1, -1)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    scales = kv_head * scale_head_stride
    cache = (
        k + kv_head * head_stride, v + kv_head * head_stride, k_scale + scales, v_scale + scales,
        page_table + sequence.to(tl.int64) * table_stride, page_stride, token_stride, scale_page_stride,
    )  # fmt: skip
    if IN_PLACE:
        if SPLIT:
            acc, top, total = attend_by_splits(
                queries, newest, first, length, cache, qk_scale, CACHE, WINDOW, HEAD_DIM, N, PAGE, SPLIT
            )
        else:
            acc, top, total = attend(
                nothing(M, D), queries, newest, first, first // N * N, length, cache, qk_scale, CACHE, WINDOW,
                HEAD_DIM, N, PAGE, True,
            )  # fmt: skip
        result = acc / tl.maximum(total, 1.0)[:, None]
        tl.store(out + at, rounded(result, out.dtype.element_ty), mask=wanted)
    else:
        begin, size, count = cut(first, length, splits, N, SPLIT, LEAST)
        for index in range(program, count, splits):
            lo = begin + index * size
            acc, top, total = attend(
                nothing(M, D), queries, newest, first, tl.maximum(lo, first // N * N), tl.minimum(lo + size, length),
                cache, qk_scale, CACHE, WINDOW, HEAD_DIM, N, PAGE, True,
            )  # fmt: skip
            slot = (sequence.to(tl.int64) * heads + head) * slots + index
            tl.store(parts + slot[:, None] * HEAD_DIM + channel[None, :], acc, mask=wanted)
            tl.store(marks + slot * 2, top, mask=is_row)
            tl.store(marks + slot * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["splits", "slots"], do_not_specialize_on_alignment=["kv_lens", "q_starts"])
def merge_kernel(
    parts,
    marks,
    kv_lens,
    q_starts,
    out,
    splits,
    slots,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    S: tl.constexpr,
):
    """Program (sequence, query head): its splits into one row, S at a time: with SPLIT one by one, in index order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(q_starts + sequence)
    if tl.load(q_starts + sequence + 1) - row != 1:
        return
    length = tl.load(kv_lens + sequence)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    _, _, count = cut(first, length, splits, N, SPLIT, LEAST)
    channel = tl.arange(0, D)
    inside = channel < HEAD_DIM
    slot = (sequence.to(tl.int64) * tl.num_programs(1) + head) * slots
    acc, top, total = tl.zeros([D], tl.float32), tl.full([], LOWEST, tl.float32), tl.zeros([], tl.float32)
    for begin in range(0, count, S):
        index = begin + tl.arange(0, S)
        at, present = slot + index, index < count
        tops = tl.load(marks + at * 2, mask=present, other=LOWEST)
        highest = tl.max(tops, 0)
        weights = tl.exp2(tops - highest)
        sums = tl.sum(weights * tl.load(marks + at * 2 + 1, mask=present, other=0), 0)
        wanted = present[:, None] & inside[None, :]
        pieces = tl.load(parts + at[:, None] * HEAD_DIM + channel[None, :], mask=wanted, other=0)
        acc, top, total = fold((acc, top, total), (tl.sum(pieces * weights[:, None], 0), highest, sums))
    result = acc / tl.maximum(total, 1.0)
    to = (row.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + channel
    tl.store(out + to, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def sequence_of(block, q_starts, sequences, TOKENS: tl.constexpr):
    """The sequence whose blocks of TOKENS tokens hold this one, if sequence b begins with block start // TOKENS + b."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(q_starts + middle) // TOKENS + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["sequences", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "q_starts"],
)
def prefill_kernel(
    q,  # [T, Hq, d]
    k,
    v,
    k_scale,
    v_scale,
    page_table,
    kv_lens,
    q_starts,
    out,  # [T, Hq * d]
    qk_scale,
    sequences,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    scale_page_stride,
    scale_head_stride,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (block, KV head): M // G tokens of a sequence with their query heads; a lone token is decode_kernel's."""
    TOKENS: tl.constexpr = M // G
    block, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(block, q_starts, sequences, TOKENS)
    start = tl.load(q_starts + sequence)
    asked = tl.load(q_starts + sequence + 1) - start
    begin = (block - (start // TOKENS + sequence)) * TOKENS
    if asked == 1 or begin >= asked:
        return
    past = tl.load(kv_lens + sequence) - asked
    token = begin + tl.arange(0, M) // G
    is_row = (token < asked) & (tl.arange(0, M) < TOKENS * G)
    channel = tl.arange(0, D)
    wanted = is_row[:, None] & (channel < HEAD_DIM)[None, :]
    head = (start + token).to(tl.int64) * (tl.num_programs(1) * G) + kv_head * G + tl.arange(0, M) % G
    at = head[:, None] * HEAD_DIM + channel[None, :]
    queries = tl.load(q + at, mask=wanted, other=0)
    newest = tl.where(is_row, past + token, -1)
    first = tl.maximum(past + begin + 1 - WINDOW, 0) if WINDOW else past * 0
    end = past + tl.minimum(begin + TOKENS, asked)
    scales = kv_head * scale_head_stride
    cache = (
        k + kv_head * head_stride, v + kv_head * head_stride, k_scale + scales, v_scale + scales,
        page_table + sequence.to(tl.int64) * table_stride, page_stride, token_stride, scale_page_stride,
    )  # fmt: skip
    if SPLIT:
        acc, top, total = attend_by_splits(
            queries, newest, first, end, cache, qk_scale, CACHE, WINDOW, HEAD_DIM, N, PAGE, SPLIT
        )
    else:
        acc, top, total = nothing(M, D)
        whole = first // N * N
        if not WINDOW:
            whole = (past + begin + 1) // N * N  # every row sees every key below
            acc, top, total = attend(
                (acc, top, total), queries, newest, 0, 0, whole, cache, qk_scale, CACHE, 0, HEAD_DIM, N, PAGE, False
            )
        acc, top, total = attend(
            (acc, top, total), queries, newest, first, whole, end, cache, qk_scale, CACHE, WINDOW, HEAD_DIM, N, PAGE,
            True,
        )  # fmt: skip
    result = acc / tl.maximum(total, 1.0)[:, None]
    tl.store(out + at, rounded(result, out.dtype.element_ty), mask=wanted)
