"""Linear layers that multiply rows of 8 bits by weights of 8 bits through torch's own scaled matrix products.

Knows no device: what is not the product is plain torch, which runs on a CPU and is the oracle of a GPU's kernels. A
weight has one scale per output, a row of inputs one of its own. Sums of int8 are exact integers, whatever kernel a
library chooses for the number of rows, so a row's result depends on that row alone; sums of e4m3 are rounded in an
order that the library chooses. The library only multiplies, into i32 or f32: cuBLAS refuses scales by row of e4m3 for
long inputs and few rows (pytorch/ao#4582).
Legend: T rows, K inputs, N outputs, both padded with zeros to multiples of PAD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from model.ops.quantised_kv import quantise

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What --quantization may ask for, and what its weights become."""
PAD = 16
"""cuBLAS takes e4m3 matrices whose sides are multiples of this, int8 ones of half as much."""
LEAST_ROWS = 32
"""torch._int_mm takes more than 16 rows on a GPU."""
MAX_INT8_INPUTS = 2**31 // (127 * 127)
"""So many products of 8-bit values fit in a 32-bit sum."""
FP8_CAPABILITY = (8, 9)
"""Chips from here on multiply e4m3."""
BLOCK_ROWS = 4096
"""Rows of a weight that are widened to fp32 at a time."""


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """Weights of one kind of CODES."""

    weight: Tensor  # [N, K] int8 or e4m3
    scale: Tensor  # [1, N] f32
    one: Tensor  # [] f32, the scale that a product itself has
    bias: Tensor | None  # [N], in the dtype of the weights as they came
    out_features: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, kind: str) -> Self:
        """weight [outputs, inputs] of any float dtype, bias [outputs]."""
        outputs, inputs = weight.shape
        assert inputs <= MAX_INT8_INPUTS, weight.shape
        codes = weight.new_zeros(padded(outputs), padded(inputs), dtype=CODES[kind])
        scale = weight.new_zeros(1, padded(outputs), dtype=torch.float32)
        for start in range(0, outputs, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, outputs))
            codes[rows, :inputs], scale[0, rows] = quantise(weight[rows], CODES[kind])
        wide_bias = None if bias is None else F.pad(bias, (0, padded(outputs) - outputs))
        return cls(codes, scale, scale.new_ones(()), wide_bias, outputs)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + self.one.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return False

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """x [T, inputs] -> [T, outputs]."""
        codes, row_scale = self.rounded(x)
        return self.rescaled(self._sums(codes), row_scale, out_dtype)

    def _sums(self, codes: Tensor) -> Tensor:
        """codes [T or more, K] -> [T or more, N], i32 of int8 and f32 of e4m3."""
        if self.weight.dtype == torch.int8:
            return torch._int_mm(codes, self.weight.t())
        whole = ScalingType.TensorWise
        return F.scaled_mm(codes, self.weight.t(), self.one, whole, self.one, whole, output_dtype=torch.float32)

    def buffer(self, x: Tensor) -> Tensor:
        """For the codes of x [T, inputs]: a multiple of PAD, LEAST_ROWS at least; those behind T mean nothing."""
        rows = max(padded(x.shape[0]), LEAST_ROWS)
        return x.new_empty(rows, self.weight.shape[1], dtype=self.weight.dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, inputs] -> codes [T or more, K], scale [T, 1] f32."""
        codes = self.buffer(x)
        values, scale = quantise(x, self.weight.dtype)
        codes[: x.shape[0]] = F.pad(values.view(torch.int8), (0, codes.shape[1] - x.shape[1])).view(codes.dtype)
        codes[x.shape[0] :] = 0
        return codes, scale.unsqueeze(1)

    def rescaled(self, sums: Tensor, row_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        """sums [T or more, N] i32 or f32, row_scale [T, 1] -> [T, outputs]."""
        wide = sums[: len(row_scale)] * row_scale * self.scale
        wide = wide if self.bias is None else wide + self.bias
        return wide[:, : self.out_features].to(out_dtype, memory_format=torch.contiguous_format)


def obstacle(kind: str, batch_invariant: bool, capability: tuple[int, int]) -> str | None:
    """Why a GPU cannot round weights so, and what to do; None if it can. capability: of the chip, (9, 0) for sm_90."""
    if kind not in CODES:
        return f"a GPU rounds weights to {' or '.join(CODES)}; {kind} is for a CPU"
    if kind != "fp8":
        return None
    if capability < FP8_CAPABILITY:
        here, least = ("".join(map(str, numbers)) for numbers in (capability, FP8_CAPABILITY))
        return f"products of fp8 need a chip of sm_{least} or later, this one is sm_{here}; use int8"
    if batch_invariant:
        return "cuBLAS sums fp8 in an order that goes by the batch, which --batch-invariant excludes; use int8"
    return None


def padded(size: int) -> int:
    return -(-size // PAD) * PAD
