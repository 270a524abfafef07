"""The kernels around a product of 8-bit rows, in Triton's interpreter, against the same layer in plain torch."""

from __future__ import annotations

import pytest
import torch

import tests.interpreted_triton  # noqa: F401  (first)
from model.ops.scaled_linear import CODES, ScaledLinear
from model.ops.triton.ops import TritonOps
from model.ops.triton.scaled import TritonScaledLinear
from tests.native_ops import random as randn

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, where a GPU says nothing
OPS = TritonOps()
HALVES = (torch.bfloat16, torch.float16)
CASES = [("int8", torch.float32), *((kind, dtype) for kind in CODES for dtype in HALVES)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (1100, 70)])
def test_a_layer_equals_its_twin(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias, x = randn(outputs, inputs, seed=1).to(dtype), randn(outputs, seed=2).to(dtype), randn(5, inputs)
    x = x.to(dtype)
    x[1], x[2, 3] = 0, float("inf")
    for own_bias in (None, bias):
        twin, packed = ScaledLinear.pack(weight, own_bias, kind), TritonScaledLinear.pack(weight, own_bias, kind)
        codes, scale = packed.rounded(x)
        want_codes, want_scale = twin.rounded(x)
        assert torch.equal(codes[:5].float(), want_codes[:5].float()) and torch.equal(scale, want_scale)
        for out_dtype in {dtype, torch.float32}:
            out, want = packed(x, out_dtype), twin(x, out_dtype)
            assert out.is_contiguous() and out.dtype == out_dtype
            torch.testing.assert_close(out, want, rtol=8e-3, atol=1e-5, equal_nan=True)
            assert out[2].isnan().all()


def test_a_model_whose_layers_are_rounded_counts_fewer_bytes_and_says_nearly_the_same() -> None:
    weight, x = randn(64, 128, seed=1).bfloat16(), randn(3, 128).bfloat16()
    whole = OPS.pack_linear(weight, None)
    want = OPS.linear(x, whole, torch.float32)
    for kind in CODES:
        packed = OPS.pack_linear(weight, None, kind)
        assert packed.nbytes == 64 * 128 + 64 * 4 + 4 < whole.nbytes
        error = OPS.linear(x, packed, torch.float32) - want
        assert float(error.norm() / want.norm()) < 0.06


def test_invariant_operations_round_to_int8_bit_by_bit_alike() -> None:
    invariant = TritonOps(batch_invariant=True)
    packed, x = invariant.pack_linear(randn(80, 96, seed=1), None, "int8"), randn(40, 96)
    together = invariant.linear(x, packed)
    assert torch.equal(invariant.linear(x[:1].contiguous(), packed), together[:1])
