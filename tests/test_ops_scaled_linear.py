"""Products of 8-bit rows through torch's scaled matrix products: near the exact ones, accounted for, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import ConfigError
from model.ops.quantised_kv import dequantise, quantise
from model.ops.scaled_linear import CODES, MAX_INT8_INPUTS, ScaledLinear, obstacle
from server.engine.facts import EngineConfig
from server.engine.startup import build_engine
from tests.native_ops import random as randn

SHAPES = [(48, 64), (40, 70), (33, 16), (300, 96)]
"""Of weights; some are no multiples of what the library takes."""
ROUNDING = {"int8": 0.02, "fp8": 0.06}
"""Relative error of a product of random matrices."""


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The product of the rounded matrices in float64."""
    left, right = (dequantise(*quantise(matrix, CODES[kind])).double() for matrix in (x, weight))
    return left @ right.T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CODES)
def test_the_product_is_that_of_the_rounded_matrices(kind: str, shape: tuple[int, int], rows: int) -> None:
    weight, bias = randn(*shape, seed=1, dtype=torch.bfloat16), randn(shape[0], seed=2, dtype=torch.bfloat16)
    x = randn(rows, shape[1], dtype=torch.bfloat16)
    for own_bias in (None, bias):
        out = ScaledLinear.pack(weight, own_bias, kind)(x, torch.bfloat16)
        assert out.is_contiguous() and out.dtype == torch.bfloat16 and out.shape == (rows, shape[0])
        want = exact(x, weight, own_bias, kind)
        torch.testing.assert_close(out.double(), want, rtol=8e-3, atol=8e-3 * float(want.abs().max()))


@pytest.mark.parametrize("kind", CODES)
def test_rounding_keeps_the_product(kind: str) -> None:
    weight, x = randn(96, 256, seed=1, dtype=torch.bfloat16), randn(40, 256, dtype=torch.bfloat16)
    want = x.double() @ weight.double().T
    error = ScaledLinear.pack(weight, None, kind)(x, torch.bfloat16).double() - want
    assert float(error.norm() / want.norm()) < ROUNDING[kind]


@pytest.mark.parametrize("kind", CODES)
def test_fp32_that_is_asked_for_is_not_rounded_in_between(kind: str) -> None:
    weight, x = randn(100, 64, seed=1, dtype=torch.bfloat16), randn(3, 64, dtype=torch.bfloat16)
    out = ScaledLinear.pack(weight, None, kind)(x, torch.float32)
    torch.testing.assert_close(out.double(), exact(x, weight, None, kind), rtol=1e-6, atol=1e-5)


def test_a_row_of_int8_is_the_same_in_any_company() -> None:
    packed = ScaledLinear.pack(randn(70, 200, seed=1), randn(70, seed=2), "int8")
    x = randn(50, 200)
    together = packed(x, torch.float32)
    for count in (1, 7, 40):
        assert torch.equal(packed(x[:count].contiguous(), torch.float32), together[:count])


@pytest.mark.parametrize("kind", CODES)
def test_a_bad_row_stays_alone_and_zeros_stay_zero(kind: str) -> None:
    packed = ScaledLinear.pack(randn(32, 64, seed=1, dtype=torch.bfloat16), None, kind)
    x = randn(4, 64, dtype=torch.bfloat16)
    want = packed(x, torch.bfloat16)
    x[1, 3], x[2] = float("nan"), 0
    out = packed(x, torch.bfloat16)
    assert out[1].isnan().all() and not out[2].any()
    assert torch.equal(out[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("kind", CODES)
def test_sums_do_not_run_over(kind: str) -> None:
    inputs = 8192
    assert inputs <= MAX_INT8_INPUTS
    out = ScaledLinear.pack(torch.ones(16, inputs), None, kind)(torch.ones(1, inputs), torch.float32)
    assert torch.allclose(out, torch.full_like(out, inputs), rtol=4e-3)


def test_a_weight_takes_the_bytes_it_promises() -> None:
    packed = ScaledLinear.pack(torch.ones(576, 1024, dtype=torch.bfloat16), torch.ones(576).bfloat16(), "fp8")
    assert packed.nbytes == 576 * 1024 + 576 * 4 + 4 + 576 * 2 and packed.out_features == 576
    assert not packed.shares(packed.weight)


@pytest.mark.parametrize(
    ("kind", "batch_invariant", "capability", "reason"),
    [
        ("int4", False, (9, 0), "rounds weights to int8 or fp8; int4 is for a CPU"),
        ("fp8", False, (8, 0), "need a chip of sm_89 or later, this one is sm_80; use int8"),
        ("fp8", True, (9, 0), "--batch-invariant excludes; use int8"),
    ],
)
def test_what_a_gpu_cannot_do_is_told(
    kind: str, batch_invariant: bool, capability: tuple[int, int], reason: str
) -> None:
    assert reason in (obstacle(kind, batch_invariant, capability) or "")


def test_what_a_gpu_can_do_has_no_obstacle() -> None:
    assert obstacle("fp8", False, (8, 9)) is None
    assert obstacle("int8", True, (7, 5)) is None


def test_a_cpu_refuses_fp8(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"--quantization fp8: (a CPU rounds weights to|needs the native CPU)"):
        build_engine(EngineConfig(str(tiny_model("llama")), quantization="fp8", device="cpu"))
