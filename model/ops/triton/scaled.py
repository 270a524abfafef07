"""Linear layers of 8 bits on a GPU: torch's scaled products between two kernels of ours.

Knows launches, no device code; what is computed is told by model/ops/scaled_linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from model.ops.scaled_linear import ScaledLinear
from model.ops.triton.cache import KINDS
from model.ops.triton.kernels.scaled import rescale_kernel, round_rows_kernel

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TritonScaledLinear(ScaledLinear):
    """The same with a launch on either side of the product."""

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        codes, scale = self.buffer(x), x.new_empty(rows, 1, dtype=torch.float32)
        kind, block = KINDS[codes.dtype], triton.next_power_of_2(codes.shape[1])
        round_rows_kernel[(rows,)](
            x, codes if kind == "int8" else codes.view(torch.uint8), scale, WIDTH=width, PADDED=codes.shape[1],
            BLOCK=block, KIND=kind, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
        return codes, scale

    def rescaled(self, sums: Tensor, row_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        rows, pitch = len(row_scale), sums.shape[1]
        out = sums.new_empty(rows, self.out_features, dtype=out_dtype)
        rescale_kernel[(rows, triton.cdiv(pitch, BLOCK))](
            sums, row_scale, self.scale, self.scale if self.bias is None else self.bias, out, WIDTH=self.out_features,
            PITCH=pitch, BIASED=self.bias is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return out
