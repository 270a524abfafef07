"""Triton attention in the interpreter, against the reference operations and against itself in other company."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import tests.interpreted_triton  # noqa: F401  (first)
from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from model.ops.interface import AttentionTables, LayerKV
from model.ops.quantised_kv import quantise
from model.ops.reference_attention import paged_attention
from model.ops.triton.attention import PagedAttention
from tests.native_ops import random as randn

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def cache_of(
    lens: list[int], kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> tuple[LayerKV, Tensor]:
    """Random keys and values on shuffled pages; scratch and every slot behind a sequence's end hold NaN."""
    width = max(1, *(-(-length // page_size) for length in lens))
    num_pages = 1 + width * len(lens)
    name = str(dtype).removeprefix("torch.")
    group = KVGroup((0,), None, kv_heads, head_dim, name, 4 if dtype in (torch.int8, torch.float8_e4m3fn) else 0)
    kv = KVCache(KVLayout(page_size, (group,)), (num_pages,), "cpu").layer(0)
    table = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1).view(len(lens), width).int()
    rows = randn(2, num_pages, kv_heads, page_size, head_dim, seed=2)
    rows[:, 0] = math.nan
    for pages, length in zip(table, lens, strict=True):
        for index, page in enumerate(pages.tolist()):
            rows[:, page, :, max(0, length - index * page_size) :] = math.nan
    for to, scale, some in zip((kv.k, kv.v), (kv.k_scale, kv.v_scale), rows, strict=True):
        if scale is None:
            to.copy_(some)
        else:
            to[:], scale[:] = quantise(some, dtype)
    return kv, table


def tables_of(table: Tensor, lens: list[int], asked: list[int]) -> AttentionTables:
    starts = torch.tensor([0, *itertools.accumulate(asked)], dtype=torch.int32)
    return AttentionTables(table, torch.tensor(lens, dtype=torch.int32), starts, max(asked), max(lens))


def compare(
    lens: list[int], asked: list[int], kv_heads: int, group: int, head_dim: int, page_size: int = 16,
    dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None, window: int | None = None,
    batch_invariant: bool = False, processors: int = 8, padding: int = 0,
) -> None:  # fmt: skip
    kv, table = cache_of(lens, kv_heads, head_dim, page_size, cache or dtype)
    q = randn(sum(asked) + padding, kv_heads * group, head_dim).to(dtype)
    tables, scale = tables_of(table, lens, asked), head_dim**-0.5
    out = PagedAttention(processors, batch_invariant)(q, kv, tables, scale, window)
    plain = kv if cache else LayerKV(kv.k.float(), kv.v.float())
    expected = paged_attention(q.float(), plain, tables, scale, window)
    assert out.dtype == dtype
    atol = 2e-2 if cache and dtype != torch.float32 else TOLERANCE[dtype]  # scaled weights are rounded to bf16
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 80), (3, 96), (4, 128), (8, 256), (20, 64)])
def test_decode(group: int, head_dim: int, batch_invariant: bool) -> None:
    compare([5, 16, 180], [1, 1, 1], 2, group, head_dim, batch_invariant=batch_invariant)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (8, 128), (4, 20)])
def test_prompts_and_chunks_and_decodes_in_one_batch(group: int, head_dim: int, batch_invariant: bool) -> None:
    compare([7, 150, 1, 65], [7, 10, 1, 1], 2, group, head_dim, batch_invariant=batch_invariant, padding=3)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_windows(window: int, batch_invariant: bool) -> None:
    compare([300, 90, 3], [1, 1, 1], 1, 2, 32, window=window, batch_invariant=batch_invariant)
    compare([200, 90, 3], [50, 1, 3], 1, 2, 32, window=window, batch_invariant=batch_invariant)


@pytest.mark.parametrize("page_size", [1, 4, 24, 64, 256])
def test_page_sizes(page_size: int) -> None:
    compare([100, 63, 130], [1, 4, 1], 1, 2, 16, page_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", [None, torch.int8, torch.float8_e4m3fn])
def test_half_precision_and_eight_bit_caches(dtype: torch.dtype, cache: torch.dtype | None) -> None:
    compare([150, 40, 3], [1, 1, 1], 2, 2, 64, dtype=dtype, cache=cache)
    compare([150, 40, 3], [20, 1, 3], 2, 2, 64, dtype=dtype, cache=cache)


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_are_read_exactly(cache: torch.dtype) -> None:
    compare([150, 40, 3], [20, 1, 3], 1, 2, 64, cache=cache)


def test_a_long_sequence_is_shared_out_until_the_chip_is_full() -> None:
    attention = PagedAttention(132, False)
    assert attention.splits(programs=8, max_kv=32768) == 33
    assert attention.splits(programs=8, max_kv=256) == 2
    assert attention.splits(programs=512, max_kv=32768) == 1
    for processors in (1, 4, 64):
        compare([400], [1], 1, 2, 16, processors=processors)


def test_rows_that_see_nothing_are_zero() -> None:
    kv, table = cache_of([4, 4], 1, 8, 4, torch.float32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    tables = AttentionTables(table, torch.tensor([0, 4], dtype=torch.int32), starts, 1, 4)
    out = PagedAttention(8, False)(randn(4, 2, 8), kv, tables, 1.0, None)
    assert out[0].eq(0).all() and out[2:].eq(0).all()
    assert out[1].isfinite().all() and out[1].ne(0).any()


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_batch_chunk_or_chip(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a prompt, as one chunk, in two, as decodes alone and together, with one program or many."""
    monkeypatch.setattr("model.ops.triton.attention.FIXED_SPLIT", 128)
    length, past = 2 * 128 + 20, 2 * 128 - 15
    kv, table = cache_of([length], 1, 16, 16, dtype)
    q = randn(length, 3, 16).to(dtype)

    def attend(first: int, last: int, processors: int = 8) -> Tensor:
        tables = tables_of(table, [last], [last - first])
        return PagedAttention(processors, True)(q[first:last], kv, tables, 0.25, window)

    whole = attend(past, length)
    for first, last in ((past, past + 9), (past + 9, length), (length - 2, length)):
        assert torch.equal(attend(first, last), whole[first - past : last - past]), (first, last)
    places = [past, 2 * 128 - 1, 2 * 128, length - 1]
    for place, processors in itertools.product(places, (1, 8)):
        assert torch.equal(attend(place, place + 1, processors)[0], whole[place - past]), place
    tables = tables_of(table.expand(len(places), -1).contiguous(), [place + 1 for place in places], [1] * len(places))
    together = PagedAttention(8, True)(q[places], kv, tables, 0.25, window)
    assert torch.equal(together, whole[torch.tensor(places) - past])
