"""Caches of 8 bits with scales in the page: their bytes, what is written, what attention reads."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from model.config import ConfigError
from model.kv_cache import KVCache
from model.kv_cost import SCALE_BYTES, KVGroup, KVLayout
from model.ops.interface import AttentionTables, LayerKV
from model.ops.quantised_kv import dequantise, quantise
from model.ops.reference import ReferenceOps
from server.engine.facts import EngineConfig
from server.engine.startup import build_engine
from server.plan.__main__ import main as plan
from tests.conftest import LiveServer
from tests.test_attention import naive, random_sequence

OPS = ReferenceOps()
QUANTISED = ("int8", "float8_e4m3fn")
POISON = 255
"""As int8 it is -1; as fp8, and in the four bytes of a scale, it is NaN."""


def pool(
    dtype: str, pages: int, heads: int, page_size: int, dim: int, layers: int = 1, window: int | None = None
) -> KVCache:
    group = KVGroup(tuple(range(layers)), window, heads, dim, dtype, SCALE_BYTES.get(dtype, 0))
    cache = KVCache(KVLayout(page_size, (group,)), (pages,), "cpu")
    cache.storages[0].view(torch.uint8).fill_(POISON)
    return cache


def write(kv: LayerKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v [T, Hkv, d] to slots [T], not turned."""
    still = torch.cat((torch.ones(1, 1), torch.zeros(1, 1)), 1)
    qkv = torch.cat((k, v), 1).flatten(1)
    OPS.rope_write(qkv, None, None, 1e-5, still, torch.zeros_like(slots), slots, kv)


# ---- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize(("heads", "dim", "page_size", "window"), [(8, 64, 16, None), (1, 8, 1, 6), (3, 20, 24, None)])
def test_allocated_is_what_was_predicted(dtype: str, heads: int, dim: int, page_size: int, window: int | None) -> None:
    cache = pool(dtype, 5, heads, page_size, dim, layers=3, window=window)
    assert cache.nbytes == cache.layout.pool_bytes((5,)) == 5 * 3 * 2 * heads * page_size * (dim + 4)
    assert cache.storages[0].untyped_storage().nbytes() == cache.nbytes


@pytest.mark.parametrize("dtype", QUANTISED)
def test_values_and_scales_fill_the_pool_without_overlap(dtype: str) -> None:
    """Every byte belongs to exactly one view; a head's page is its values, then its scales."""
    cache = pool(dtype, 3, 2, 4, 8, layers=2)
    cache.storages[0].zero_()
    for layer in range(2):
        kv = cache.layer(layer)
        assert kv.k.shape == kv.v.shape == (3, 2, 4, 8) and kv.k.dtype == getattr(torch, dtype) and kv.page_size == 4
        for view in (kv.k, kv.v, kv.k_scale, kv.v_scale):
            assert view is not None
            view.view(torch.uint8).add_(1)
    assert cache.storages[0].eq(1).all()
    kv = cache.layer(1)
    assert kv.v_scale is not None and kv.v_scale.dtype == torch.float32 and kv.v_scale.shape == (3, 2, 4)
    assert kv.v_scale[2, 1].data_ptr() - kv.v[2, 1].data_ptr() == 4 * 8


def test_a_plain_cache_has_no_scales() -> None:
    kv = pool("bfloat16", 2, 1, 4, 8).layer(0)
    assert kv.k_scale is None and kv.v_scale is None and kv.k.is_contiguous()


# ---- writing ----------------------------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    values, scale = quantise(torch.tensor([[2.5, 127.0, -127.0, 3.5], [0.0, 0.0, 0.0, 0.0]]), torch.int8)
    assert scale.tolist() == [1.0, 0.0]
    assert values.tolist() == [[2, 127, -127, 4], [0, 0, 0, 0]]  # to even
    assert dequantise(values, scale)[1].eq(0).all()


def test_fp8_by_hand() -> None:
    values, scale = quantise(torch.tensor([[448.0, -224.0, 17.0, 0.3]]), torch.float8_e4m3fn)
    assert scale.tolist() == [1.0]
    assert values.float().tolist() == [[448.0, -224.0, 16.0, 0.3125]]  # 16, 18 and 0.28125, 0.3125 are neighbours


@pytest.mark.parametrize(("dtype", "relative"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)])
def test_error_of_a_row(dtype: torch.dtype, relative: float) -> None:
    """int8: half a step of amax / 127. fp8: 1/16 of each value, or half the smallest step, 2^-10 of amax / 448."""
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 500).unsqueeze(1)
    off = (dequantise(*quantise(rows, dtype)).double() - rows.double()).abs()
    amax = rows.double().abs().amax(1, keepdim=True)
    bound = amax * relative if dtype == torch.int8 else (rows.double().abs() * relative).clamp(min=amax / 448 * 2**-10)
    assert (off <= bound * 1.0001).all()


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [1e-45, 1e-42, 1e-38, 3e38])
def test_the_ends_of_the_range_stay_in_it(dtype: str, scale: float) -> None:
    rows = torch.tensor([[1.0, -1.0, 0.5, 0.0]]) * scale
    back = dequantise(*quantise(rows, getattr(torch, dtype)))
    assert back.isfinite().all() and (back.abs() <= rows.abs().amax() * 1.2).all() and back[0, 3] == 0


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row_and_its_head(dtype: str, bad: float) -> None:
    kv, clean = (pool(dtype, 3, 2, 4, 8).layer(0) for _ in range(2))
    _, k, v = random_sequence(3, 2, 2, 8, seed=0)
    slots = torch.tensor([5, 6, 7])
    write(clean, slots, k, v)
    spoilt = v.clone()
    spoilt[1, 0, 3] = bad
    write(kv, slots, k, spoilt)
    assert kv.v_scale is not None and clean.v_scale is not None
    read, expected = dequantise(kv.v, kv.v_scale)[1], dequantise(clean.v, clean.v_scale)[1]
    assert read[0, 2].isnan().all()
    read[0, 2] = expected[0, 2]
    assert torch.equal(read[:, 1:], expected[:, 1:])


@pytest.mark.parametrize("dtype", QUANTISED)
def test_only_the_slots_are_written(dtype: str) -> None:
    cache, (_, k, v) = pool(dtype, 4, 2, 4, 8), random_sequence(2, 2, 2, 8, seed=1)
    kv = cache.layer(0)
    write(kv, torch.tensor([5, 14]), k, v)
    for row, (page, offset) in enumerate([(1, 1), (3, 2)]):
        for values, scale, rows in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
            assert scale is not None
            expected = quantise(rows[row], values.dtype)
            assert torch.equal(values[page, :, offset].float(), expected[0].float())
            assert torch.equal(scale[page, :, offset], expected[1])
            values.view(torch.uint8)[page, :, offset] = POISON
            scale.view(torch.int32)[page, :, offset] = -1
    assert cache.storages[0].eq(POISON).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_copied_pages_bring_their_scales(dtype: str) -> None:
    cache = pool(dtype, 5, 2, 4, 8)
    kv, raw = cache.layer(0), cache.storages[0][0]
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(0)))
    before = raw.clone()
    OPS.copy_pages(kv, torch.tensor([1, 2]), torch.tensor([3, 0]))
    assert torch.equal(raw, before[:, [2, 1, 2, 1, 4]])


# ---- attention --------------------------------------------------------------------------------------------


class Sequences:
    """Sequences written token by token over shuffled pages of a poisoned pool; scratch (page 0) holds NaN."""

    def __init__(self, dtype: str, rows: list[tuple[Tensor, Tensor]], page_size: int) -> None:
        _, heads, dim = rows[0][0].shape
        width = max(-(-len(k) // page_size) for k, _ in rows)
        self.kv = pool(dtype, 1 + width * len(rows), heads, page_size, dim).layer(0)
        order = torch.randperm(width * len(rows), generator=torch.Generator().manual_seed(0)) + 1
        self.table = order.view(len(rows), width).to(torch.int32)
        for table, (k, v) in zip(self.table, rows, strict=True):
            at = torch.arange(len(k))
            write(self.kv, table.long()[at // page_size] * page_size + at % page_size, k, v)

    def attend(self, q: list[Tensor], lens: list[int], window: int | None = None) -> list[Tensor]:
        counts = [len(rows) for rows in q]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tables = AttentionTables(self.table, torch.tensor(lens, dtype=torch.int32), starts, max(counts), max(lens))
        out = OPS.attention(torch.cat(q), self.kv, tables, q[0].shape[-1] ** -0.5, window)
        return list(out.split(counts))  # type: ignore[no-untyped-call]


def stored(rows: Tensor, dtype: str) -> Tensor:
    return dequantise(*quantise(rows, getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(9, 3, 64, 16), (4, 4, 8, 4), (8, 1, 20, 256)])
def test_attention_against_float64_of_what_is_stored(
    dtype: str, heads: int, kv_heads: int, dim: int, page_size: int, window: int | None
) -> None:
    q, k, v = random_sequence(150, heads, kv_heads, dim, seed=0)
    (out,) = Sequences(dtype, [(k, v)], page_size).attend([q], [150], window)
    expected = naive(q, stored(k, dtype), stored(v, dtype), dim**-0.5, window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.02), ("float8_e4m3fn", 0.1)])
def test_attention_against_the_plain_cache(dtype: str, bound: float) -> None:
    """Keys and values of unit variance, 64 channels: the answer moves by at most 0.02 (int8) or 0.1 (fp8)."""
    q, k, v = random_sequence(150, 6, 2, 64, seed=3)
    (plain,) = Sequences("float32", [(k, v)], 16).attend([q], [150])
    (quantised,) = Sequences(dtype, [(k, v)], 16).attend([q], [150])
    assert 0 < (plain - quantised).abs().max() <= bound


@pytest.mark.parametrize("dtype", QUANTISED)
def test_chunks_company_and_page_size_change_no_bit(dtype: str) -> None:
    rows = [random_sequence(length, 6, 2, 16, seed=length) for length in (135, 3, 70)]
    lens = [len(q) for q, _, _ in rows]
    together = Sequences(dtype, [(k, v) for _, k, v in rows], 4)
    whole = together.attend([q for q, _, _ in rows], lens)
    decoded = together.attend([q[-1:] for q, _, _ in rows], lens)
    for (q, k, v), expected, last in zip(rows, whole, decoded, strict=True):
        assert torch.equal(expected[-1:], last)
        for page_size in (1, 24, 256):
            alone = Sequences(dtype, [(k, v)], page_size)
            for cut in (1, 2, len(q) - 1, len(q)):
                assert torch.equal(alone.attend([q[:cut]], [cut])[0], expected[:cut])
                assert torch.equal(alone.attend([q[-cut:]], [len(q)])[0], expected[-cut:])


def test_half_precision_rows_are_quantised_as_they_are() -> None:
    """The scale comes from the row that a plain cache would hold, in the dtype of the activations."""
    kv, (_, k, v) = pool("int8", 2, 2, 4, 8).layer(0), random_sequence(1, 2, 2, 8, seed=0)
    write(kv, torch.tensor([4]), k.bfloat16(), v.bfloat16())
    assert kv.v_scale is not None
    assert torch.equal(kv.v_scale[1, :, 0], v.bfloat16().float().abs().amax(-1)[0] / 127)


# ---- serving ----------------------------------------------------------------------------------------------


def test_a_page_whose_scales_would_not_be_aligned_is_refused(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", head_dim=6)
    with pytest.raises(ConfigError, match=r"--page-size 1: .* 1 \* 6 bytes .* multiple of 4; use an even page size"):
        build_engine(EngineConfig(str(folder), device="cpu", page_size=1, kv_cache_dtype="int8"))


@pytest.mark.parametrize(("flag", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_what_the_plan_says_is_what_the_server_allocates(
    tiny_model: Callable[..., Path], server_factory: Callable[..., LiveServer], flag: str, dtype: str
) -> None:
    """`fp8` is vLLM's spelling."""
    load = ["--page-size", "4", "--max-model-len", "64", "--max-num-seqs", "3", "--kv-cache-dtype", flag]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert plan([str(tiny_model()), "--memory", "1GiB", "--json", *load]) == 0
    needed = json.loads(out.getvalue())["needed"]
    server = server_factory(tiny_model(), *load, "--kv-cache-memory", str(needed))
    held = httpx.get(f"{server.url}/kv/summary").json()["bytes"]
    assert held["predicted"] == held["allocated"] == needed == 48 * 2 * 2 * 2 * 4 * (8 + 4) + 2 * 2 * 2 * 4 * (8 + 4)
    version = httpx.get(f"{server.url}/version").json()
    assert version["kv_dtype"] == dtype and f"KV {dtype}" in server.output
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 8, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 8
