"""Triton's small kernels and matrix product in the interpreter, against the reference operations and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.interpreted_triton  # noqa: F401  (first)
from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from model.ops.interface import LayerKV
from model.ops.quantised_kv import dequantise
from model.ops.reference import ReferenceOps
from model.ops.select import ops_for, why
from model.ops.triton.ops import TritonOps
from tests.native_ops import random as randn

OPS, INVARIANT, REFERENCE = TritonOps(), TritonOps(batch_invariant=True), ReferenceOps()
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, where a GPU says nothing
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative: one rounding


def close(value: Tensor, expected: Tensor) -> None:
    assert value.dtype == expected.dtype
    torch.testing.assert_close(value.float(), expected.float(), rtol=STEP[value.dtype], atol=STEP[value.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 576, 4097])
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(3, width).to(dtype), randn(3, width, seed=1).to(dtype), randn(width, seed=2).to(dtype)
    for before in (residual, None):
        out, total = OPS.add_rms_norm(x, before, weight, 1e-5)
        expected, expected_total = REFERENCE.add_rms_norm(x, before, weight, 1e-5)
        assert torch.equal(total, expected_total)
        close(out, expected)
        alone, _ = OPS.add_rms_norm(x[2:], None if before is None else before[2:], weight, 1e-5)
        assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 1024, 1537])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = (randn(3, 2 * width) * 5).to(dtype)
    out = OPS.silu_mul(gate_up)
    close(out, REFERENCE.silu_mul(gate_up))
    assert torch.equal(OPS.silu_mul(gate_up[2:])[0], out[2])
    assert OPS.silu_mul(torch.tensor([[-80.0, 1.0]])).abs().item() < 1e-30


def cache_of(dtype: torch.dtype, kv_heads: int, head_dim: int, page_size: int = 4) -> LayerKV:
    name = str(dtype).removeprefix("torch.")
    group = KVGroup((0,), None, kv_heads, head_dim, name, 4 if dtype in (torch.int8, torch.float8_e4m3fn) else 0)
    cache = KVCache(KVLayout(page_size, (group,)), (5,), "cpu")
    cache.storages[0].zero_()
    return cache.layer(0)


def written(
    ops: TritonOps | ReferenceOps,
    qkv: Tensor,
    cache: torch.dtype,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    norms: bool,
) -> tuple[Tensor, LayerKV]:
    kv = cache_of(cache, kv_heads, head_dim)
    q_norm, k_norm = (randn(head_dim, seed=seed).to(qkv.dtype) if norms else None for seed in (3, 4))
    angles = randn(50, rotary // 2, seed=5)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions, slots = torch.tensor([49, 3, 0, 7]), torch.tensor([5, 19, 4, 8])
    return ops.rope_write(qkv, q_norm, k_norm, 1e-5, table, positions, slots, kv), kv


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim", "rotary"), [(1, 64, 64), (3, 80, 32), (4, 96, 96), (8, 128, 64), (2, 256, 256)]
)
def test_rotation_and_write(group: int, head_dim: int, rotary: int, dtype: torch.dtype, norms: bool) -> None:
    qkv = randn(4, (group + 2) * 2 * head_dim).to(dtype)
    q, kv = written(OPS, qkv, dtype, 2, head_dim, rotary, norms)
    expected, expected_kv = written(REFERENCE, qkv, dtype, 2, head_dim, rotary, norms)
    close(q, expected)
    close(kv.k, expected_kv.k)
    assert torch.equal(kv.v, expected_kv.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_eight_bit_write(cache: torch.dtype, dtype: torch.dtype) -> None:
    """Values and their scales as the reference quantises them; zeros, tiny numbers, NaN and inf included."""
    qkv = (randn(4, 4 * 64) * torch.tensor([1e-6, 1.0, 300.0, 0.0]).unsqueeze(1)).to(dtype)
    qkv[1, 130], qkv[2, 3 * 64 + 7] = torch.nan, torch.inf
    _, kv = written(OPS, qkv, cache, 1, 64, 32, norms=False)
    _, expected = written(REFERENCE, qkv, cache, 1, 64, 32, norms=False)
    for ours, scale, theirs, their_scale in (
        (kv.k, kv.k_scale, expected.k, expected.k_scale),
        (kv.v, kv.v_scale, expected.v, expected.v_scale),
    ):
        assert scale is not None and their_scale is not None
        torch.testing.assert_close(
            scale, their_scale, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0, equal_nan=True
        )
        exact = (scale == their_scale).unsqueeze(-1)
        torch.testing.assert_close(
            dequantise(ours, scale).where(exact, 0),
            dequantise(theirs, their_scale).where(exact, 0),
            rtol=0.13,
            atol=1e-3,
            equal_nan=True,
        )
    assert kv.v_scale is not None and expected.v_scale is not None
    assert torch.equal(kv.v.float(), expected.v.float())


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_copy_pages(cache: torch.dtype) -> None:
    qkv = randn(4, 4 * 2 * 64)
    _, kv = written(REFERENCE, qkv, cache, 2, 64, 64, norms=False)
    _, expected = written(REFERENCE, qkv, cache, 2, 64, 64, norms=False)
    src, dst = torch.tensor([1, 4]), torch.tensor([3, 0])
    OPS.copy_pages(kv, src, dst)
    REFERENCE.copy_pages(expected, src, dst)
    for ours, theirs in ((kv.k, expected.k), (kv.v, expected.v), (kv.k_scale, expected.k_scale)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), [(64, 96), (100, 33), (200, 70)])
def test_linear(width: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*shape).to(dtype) for shape in ((70, width), (outputs, width), (outputs,)))
    exact = x.double() @ weight.double().T + bias.double()
    for ops in (OPS, INVARIANT):
        packed = ops.pack_linear(weight, bias)
        out, wide = ops.linear(x, packed), ops.linear(x, packed, torch.float32)
        assert (out.dtype, wide.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(out.double(), exact, rtol=STEP[dtype], atol=max(STEP[dtype], 5e-5))
        torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=5e-5)
        assert packed.nbytes == weight.nbytes + bias.nbytes and packed.out_features == outputs
    plain = x.double() @ weight.double().T
    torch.testing.assert_close(
        INVARIANT.linear(x, INVARIANT.pack_linear(weight, None), torch.float32).double(), plain, rtol=1e-6, atol=5e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    x, packed = randn(130, 70).to(dtype), INVARIANT.pack_linear(randn(40, 70, seed=1).to(dtype), None)
    whole = INVARIANT.linear(x, packed)
    for rows in (1, 2, 31, 64, 65):
        assert torch.equal(INVARIANT.linear(x[:rows], packed), whole[:rows]), rows
        assert torch.equal(INVARIANT.linear(x[130 - rows :], packed), whole[130 - rows :]), rows


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_gpu_is_served_by_them(batch_invariant: bool) -> None:
    ops = ops_for("cuda", batch_invariant)
    assert isinstance(ops, TritonOps) and ops.batch_invariant == batch_invariant
    assert why("cuda") == "Triton kernels"
