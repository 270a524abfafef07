"""Native linear layers of every kind of weight: right within rounding, each row bit-equal whatever shares its batch.

Once with what this CPU has, once with its dot-product layouts computed by their portable forms: what a CPU with such
instructions would run, edges and all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.ops.cpu.build import UnavailableError
from model.ops.cpu.native import CpuOps
from model.ops.cpu.rounding import ROUNDINGS, in_groups, restored_int4, turned
from tests.native_ops import close, compiler_or_skip, ops_built_with, random, threads

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 1), (31, 7), (33, 35), (49, 1), (50, 333), (96, 1536), (1000, 66), (31, 2050)]  # N, K
KINDS = (None, "int8", "int4")


@pytest.fixture(scope="module", params=["", "-DRW_EMULATE_DOTS"], ids=["own", "emulated"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with ops_built_with(request.param) as built:
        yield built


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_agrees_with_float64(ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1)
    x = random(19, shape[1], dtype=dtype, seed=2)
    packed = ops.pack_linear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    close(ops.linear(x, packed), expected.to(dtype), dtype)
    close(ops.linear(x, packed, torch.float32), expected.float(), torch.float32)
    assert packed.out_features == shape[0] and packed.nbytes >= weight.nbytes


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 35), (50, 333), (31, 2050)])
def test_a_row_is_bit_equal_in_any_batch(
    ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype, quantization: str | None
) -> None:
    x = random(512, shape[1], dtype=dtype)
    x[3] = 0
    packed = ops.pack_linear(random(*shape, dtype=dtype, seed=1), None, quantization)
    whole = ops.linear(x, packed, torch.float32)
    assert torch.equal(whole[3], torch.zeros_like(whole[3]))
    for rows in (*range(1, 40), 63, 97, 200, 257, 511):
        assert torch.equal(ops.linear(x[:rows], packed, torch.float32), whole[:rows]), rows
    for seed in range(5):
        pick = torch.randperm(512, generator=torch.Generator().manual_seed(seed))[: 7 * seed + 1]
        assert torch.equal(ops.linear(x[pick], packed, torch.float32), whole[pick])
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(ops.linear(x, packed, torch.float32), whole), count


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_row_stays_alone(ops: CpuOps, dtype: torch.dtype, quantization: str | None) -> None:
    x, packed = random(9, 70, dtype=dtype), ops.pack_linear(random(40, 70, dtype=dtype, seed=1), None, quantization)
    clean = ops.linear(x, packed)
    x[4], x[6, 0] = torch.nan, torch.inf
    spoilt = ops.linear(x, packed)
    good = torch.ones(9, dtype=torch.bool)
    good[[4, 6]] = False
    assert torch.equal(spoilt[good], clean[good]) and not spoilt[~good].isfinite().any()


def test_fp32_rows_meet_bf16_weights(ops: CpuOps) -> None:
    weight, x = random(50, 35, dtype=torch.bfloat16), random(7, 35, seed=1)
    expected = x.double() @ weight.double().T
    close(ops.linear(x, ops.pack_linear(weight, None)), expected.float(), torch.float32)
    close(
        ops.linear(x.bfloat16(), ops.pack_linear(weight.float(), None)),
        (x.bfloat16().double() @ weight.double().T).bfloat16(),
        torch.bfloat16,
    )


def test_bf16_output_rounds_to_nearest_even_and_keeps_nan(ops: CpuOps) -> None:
    """Against torch's own cast, for every upper half and the lower halves around a tie."""
    bits = torch.arange(-(1 << 15), 1 << 15).unsqueeze(1) << 16
    values = (bits + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])).flatten().to(torch.int32).view(torch.float32)
    one = ops.pack_linear(torch.ones(1, 1), None)
    actual = ops.linear(values.unsqueeze(1), one, torch.bfloat16).flatten()
    expected = (values * 1.0 + 0.0).to(torch.bfloat16)
    assert torch.equal(actual.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(actual[kept], expected[kept])


# ---- rounded weights -------------------------------------------------------------------------------------------------
def rounded_inputs(x: Tensor, bits: int) -> Tensor:
    """x [M, K] as it is rounded on the way in: whole numbers from -127 to 127 times the scale of each group; f64."""
    groups = turned(in_groups(x.float(), 64)) if bits == 8 else in_groups(x.float(), 32)
    top = groups.abs().amax(2, keepdim=True)
    inverse = torch.full_like(top, 127).div(top.clamp(min=1e-30))  # not 127 / top: a rounded reciprocal, multiplied
    return ((groups * inverse).round().double() * (top / 127).double()).flatten(1)


def rounded_weights(weight: Tensor, bits: int) -> Tensor:
    codes, factors = ROUNDINGS[bits](weight.float())
    codes, factors = codes.double(), factors.double()
    values = (codes - 128) * factors if bits == 8 else codes * factors[..., :1] + factors[..., 1:]
    return values.flatten(1)


def test_groups_are_turned_by_an_orthonormal_matrix_of_equal_sizes() -> None:
    turn = turned(torch.eye(64).unsqueeze(1)).squeeze(1)
    assert torch.equal(turn @ turn.T, torch.eye(64)) and torch.equal(turn.abs(), torch.full_like(turn, 1 / 8))


def test_4_bit_scales_err_less_than_the_plain_ones() -> None:
    """Plain: the least weight is code 0, the largest 15. Equal weights are kept exactly."""
    weight = random(50, 96)
    groups = in_groups(weight, 32)
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    codes, factors = ROUNDINGS[4](weight)
    error = (restored_int4(codes, factors) - groups).square().sum()
    assert float(error) < 0.96 * float((plain - groups).square().sum())
    for value in (0.0, 0.75):
        equal = torch.full((2, 32), value)
        assert torch.equal(restored_int4(*ROUNDINGS[4](equal)).flatten(1), equal)


def test_weights_that_were_4_bit_groups_before_are_kept() -> None:
    """Codes of a file with a scale and a minimum per 32 inputs, each group using all of its range."""
    codes = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(i)) % 16 for i in range(40)])
    weight = codes * 0.25 - 1.5
    assert torch.equal(restored_int4(*ROUNDINGS[4](weight)).flatten(1), weight)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_rounded_values(
    ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype, quantization: str, bits: int
) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1)
    x = random(19, shape[1], dtype=dtype, seed=2)
    expected = rounded_inputs(x, bits) @ rounded_weights(weight, bits).T + bias.double()
    packed = ops.pack_linear(weight, bias, quantization)
    close(ops.linear(x, packed, torch.float32), expected.float(), torch.float32)
    close(ops.linear(x, packed, torch.bfloat16), expected.bfloat16(), torch.bfloat16)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8 + 16 / 64), ("int4", 4 + 32 / 32)])
def test_rounded_weights_take_the_bytes_they_promise(ops: CpuOps, quantization: str, bits: float) -> None:
    assert ops.pack_linear(random(576, 1024), None, quantization).nbytes == 576 * 1024 * bits / 8


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.01), ("int4", 0.12)])
def test_rounding_keeps_the_product(ops: CpuOps, quantization: str, limit: float) -> None:
    """The relative error of a product of random weights: steps of 1 / 127 or 1 / 7 of the largest of a group."""
    weight, x = random(64, 512), random(32, 512, seed=1)
    exact = x @ weight.T
    error = ops.linear(x, ops.pack_linear(weight, None, quantization)) - exact
    assert 0 < float(error.norm() / exact.norm()) < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_input_leaves_its_neighbours_their_digits(ops: CpuOps, dtype: torch.dtype) -> None:
    """Weights ignore the large input; in steps of 1 / 127 of it the others would err by a fifth of theirs."""
    weight, x = random(64, 512, dtype=dtype), random(32, 512, dtype=dtype, seed=1)
    weight[:, ::64], x[:, ::64] = 0, 100
    exact = x.float() @ weight.float().T
    error = ops.linear(x, ops.pack_linear(weight, None, "int8"), torch.float32) - exact
    assert float(error.norm() / exact.norm()) < 0.1


def test_inputs_too_small_to_divide_by_are_zeros(ops: CpuOps) -> None:
    x, weight = torch.full((2, 70), 1e-38), random(40, 70)
    assert not ops.linear(x, ops.pack_linear(weight, None, "int8")).any()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extreme_sums_do_not_saturate(ops: CpuOps, sign: float) -> None:
    """Products at their largest, of one sign: 255 * 127 a byte for 8-bit weights, 15 * 127 for 4-bit ones."""
    extreme = turned(torch.ones(1, 64, 64)).flatten(1)  # the turn undoes itself
    actual = ops.linear(extreme.repeat(3, 1), ops.pack_linear(sign * extreme.repeat(40, 1), None, "int8"))
    torch.testing.assert_close(actual, torch.full((3, 40), sign * 4096), rtol=5e-3, atol=0)
    weight = torch.ones(40, 4096)
    weight[:, ::32] = 0
    actual = ops.linear(torch.full((3, 4096), sign), ops.pack_linear(weight, None, "int4"))
    torch.testing.assert_close(actual, torch.full((3, 40), sign * 4096 * 31 / 32), rtol=5e-3, atol=0)


def test_an_unknown_quantization_is_refused(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="int8, int4"):
        ops.pack_linear(random(4, 4), None, "int3")
    with pytest.raises(ValueError, match="needs native kernels"):
        ops.pack_linear(random(4, 4).half(), None, "int8")


# ---- instructions that could not be tried where the library was written ----------------------------------------------
def test_a_library_whose_dot_products_are_wrong_is_refused(tmp_path: Path) -> None:
    source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text('extern "C" int rw_check_dots() { return 0; }\n')
    subprocess.run([*compiler_or_skip(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(UnavailableError, match="RW_NO_DOTS"):
        CpuOps(library)
