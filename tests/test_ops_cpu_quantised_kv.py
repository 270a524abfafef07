"""Caches of 8 bits on native operations: written bit for bit as the reference writes them, read as it reads them.

Pools are full of 255s: NaN as a scale and as fp8, so whatever is read beside its slots shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model.ops.cpu.native import CpuOps
from model.ops.interface import LayerKV
from model.ops.quantised_kv import dequantise, quantise
from model.ops.reference import ReferenceOps
from tests.native_ops import close, ops_built_with, random, threads
from tests.test_kv_quantised import QUANTISED, pool
from tests.test_ops_cpu import DTYPES, REFERENCE, Scene


@pytest.fixture(scope="module", params=["", "-DRW_NO_DOTS -DRW_EMULATE_DOTS"], ids=["own", "emulated"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    """Emulated: attention multiplies pairs of bf16 on any CPU, in the portable form."""
    with ops_built_with(request.param) as built:
        yield built


# ---- writing ---------------------------------------------------------------------------------------------------------
def written(ops: CpuOps | ReferenceOps, dtype: str, k: Tensor, v: Tensor) -> Tensor:
    """k and v [T, Hkv, d], not turned, in slots 1, 3, 5 ...: all bytes of the pool."""
    tokens, heads, dim = k.shape
    cache = pool(dtype, tokens, heads, 4, dim)
    qkv = torch.cat((k, v), 1).flatten(1)
    still = torch.cat((torch.ones(1, dim), torch.zeros(1, dim)), 1)[:, : dim // 2 * 2]
    still[:, : dim // 2], still[:, dim // 2 :] = 1, 0
    slots, positions = torch.arange(tokens) * 2 + 1, torch.zeros(tokens, dtype=torch.int64)
    ops.rope_write(qkv, None, None, 1e-5, still, positions, slots, cache.layer(0))
    return cache.storages[0]


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 8), (1, 20), (1, 256)])
def test_rows_are_written_as_the_reference_writes_them(
    ops: CpuOps, dtype: torch.dtype, heads: int, dim: int, kv_dtype: str
) -> None:
    """From the largest to subnormal rows, rows of zeros, and values half-way between two steps."""
    sizes = torch.logspace(-44, 38, 83).view(-1, 1, 1)
    k, v = (random(83, heads, dim, seed=seed).mul_(sizes).clamp_(-3e38, 3e38).to(dtype) for seed in (1, 2))
    k[0], v[5] = 0, 0
    k[40, :, :8] = torch.tensor([127, 2.5, 3.5, -2.5, -0.5, 0.5, 1.5, -127]).to(dtype)
    k[40, :, 8:] = 0.25
    assert torch.equal(written(ops, kv_dtype, k, v), written(REFERENCE, kv_dtype, k, v))


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_row_alone(ops: CpuOps, bad: float, kv_dtype: str) -> None:
    kv, clean = (pool(kv_dtype, 3, 2, 4, 16).layer(0) for _ in range(2))
    qkv = random(2, 4 * 16)
    still, at = torch.tensor([[1.0, 0.0]]), torch.zeros(2, dtype=torch.int64)
    ops.rope_write(qkv, None, None, 1e-5, still, at, torch.tensor([5, 6]), clean)
    qkv[1, 2 * 16 + 3] = bad  # the second token's first value
    ops.rope_write(qkv, None, None, 1e-5, still, at, torch.tensor([5, 6]), kv)
    for values, scale, was, was_scale in (
        (kv.k, kv.k_scale, clean.k, clean.k_scale),
        (kv.v, kv.v_scale, clean.v, clean.v_scale),
    ):
        assert scale is not None and was_scale is not None
        read, expected = dequantise(values, scale)[1, :, 1:3], dequantise(was, was_scale)[1, :, 1:3]
        if values is kv.v:
            assert read[0, 1].isnan().all()
            read[0, 1] = expected[0, 1]
        assert torch.equal(read, expected)


# ---- reading ---------------------------------------------------------------------------------------------------------
class QuantisedScene(Scene):
    """The sequences of a Scene, in 8 bits."""

    def __init__(
        self, lens: list[int], heads: tuple[int, int, int], page_size: int, dtype: torch.dtype, kv_dtype: str
    ) -> None:
        """heads: query heads, KV heads, head_dim."""
        super().__init__(lens, *heads, page_size, dtype)
        plain = self.kv
        self.kv = pool(kv_dtype, plain.k.shape[0], heads[1], page_size, heads[2]).layer(0)
        for values, scale, rows in ((self.kv.k, self.kv.k_scale, plain.k), (self.kv.v, self.kv.v_scale, plain.v)):
            assert scale is not None
            held = ~rows.isnan().any(-1)
            steps, scales = quantise(rows, values.dtype)
            values.view(torch.uint8)[held], scale[held] = steps.view(torch.uint8)[held], scales[held]


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_every_value_of_8_bits_is_read_exactly(ops: CpuOps, kv_dtype: str) -> None:
    """One token is seen: its weight is 1, so the answer is value times scale."""
    kv = pool(kv_dtype, 2, 1, 2, 256).layer(0)
    assert kv.k_scale is not None and kv.v_scale is not None
    kv.v.view(torch.uint8)[1, 0, 0], kv.v_scale[1, 0, 0] = torch.arange(256, dtype=torch.uint8), 0.3
    kv.k.view(torch.uint8)[1, 0, 0], kv.k_scale[1, 0, 0] = 0, 1.0
    scene = Scene([1], 1, 1, 256, 2, torch.float32)
    scene.kv, scene.page_table = kv, torch.ones(1, 1, dtype=torch.int32)
    torch.testing.assert_close(
        scene.ask(ops, [(0, 0, 1)])[0][0], dequantise(kv.v, kv.v_scale)[1, 0, 0], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [4, 16, 24])
@pytest.mark.parametrize("heads", [(2, 2, 8), (9, 3, 64), (8, 2, 20), (16, 1, 40), (2, 1, 256)])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_attention_agrees_with_the_reference(
    ops: CpuOps, heads: tuple[int, int, int], page_size: int, dtype: torch.dtype, kv_dtype: str, window: int | None
) -> None:
    scene = QuantisedScene([1, 63, 64, 65, 150], heads, page_size, dtype, kv_dtype)
    spans = [(0, 0, 1), (1, 60, 63), (2, 63, 64), (3, 0, 65), (4, 149, 150), (4, 100, 141)]
    for actual, expected in zip(scene.ask(ops, spans, window), scene.ask(REFERENCE, spans, window), strict=True):
        close(actual, expected, dtype)


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 90])
def test_rows_are_bit_equal_however_the_prompt_is_cut(
    ops: CpuOps, dtype: torch.dtype, kv_dtype: str, window: int | None
) -> None:
    scene = QuantisedScene([200, 333], (9, 3, 64), 16, dtype, kv_dtype)
    whole = scene.ask(ops, [(0, 0, 200), (1, 0, 333)], window)
    for count in (1, 2, 3):
        with threads(count):
            for chunk in (7, 64, 100):
                assert torch.equal(scene.ask_in_chunks(ops, 1, chunk, window), whole[1]), (count, chunk)
            for row in (0, 63, 64, 199):  # decoded, alone and beside another
                assert torch.equal(scene.ask(ops, [(0, row, row + 1)], window)[0][0], whole[0][row])
                pair = scene.ask(ops, [(1, 5, 70), (0, row, row + 1)], window)
                assert torch.equal(pair[1][0], whole[0][row]) and torch.equal(pair[0], whole[1][5:70])


@pytest.mark.parametrize("part", ["k_scale", "v_scale"])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_nan_touches_no_earlier_row(ops: CpuOps, dtype: torch.dtype, kv_dtype: str, part: str) -> None:
    """Nor one of infinity, which is what a row with infinity has."""
    scene = QuantisedScene([70], (4, 2, 16), 4, dtype, kv_dtype)
    clean = scene.ask(ops, [(0, 0, 70)])[0]
    scale: Tensor = getattr(scene.kv, part)
    for bad, token in ((math.nan, 66), (math.inf, 65)):
        page, offset = int(scene.page_table[0, token // 4]), token % 4
        scale[page, :, offset] = bad
        values = scene.kv.k if part == "k_scale" else scene.kv.v
        values.view(torch.uint8)[page, :, offset] = 0
        spoilt = scene.ask(ops, [(0, 0, 70)])[0]
        assert torch.equal(spoilt[:token], clean[:token]) and spoilt[token:].isnan().all()


def test_scales_elsewhere_than_in_the_page_are_not_taken(ops: CpuOps) -> None:
    scene = QuantisedScene([5], (2, 1, 16), 4, torch.float32, "int8")
    kv = scene.kv
    assert kv.k_scale is not None
    scene.kv = LayerKV(kv.k, kv.v, kv.k_scale.clone(), kv.v_scale)
    with pytest.raises(AssertionError, match="scales are not in the page"):
        scene.ask(ops, [(0, 0, 5)])
