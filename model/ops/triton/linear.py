"""Matrix products on a GPU: cuBLAS, or one kernel whose rows do not depend on their number.

Knows no layers. cuBLAS chooses its kernel by shape, so that a row's bits change with the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from model.ops.triton.kernels.linear import linear_kernel


@dataclass(frozen=True, slots=True)
class GPULinear:
    """Weights as they came. batch_invariant: through our own kernel."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    batch_invariant: bool

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return self.weight is tensor

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """x [T, K] -> [T, N]; sums are fp32, whatever out_dtype."""
        if self.batch_invariant:
            return self._one_tile(x, out_dtype)
        if out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if x.is_cuda:
            out = torch.mm(x, self.weight.t(), out_dtype=out_dtype)
            return out if self.bias is None else out + self.bias
        return F.linear(
            x.to(out_dtype), self.weight.to(out_dtype), None if self.bias is None else self.bias.to(out_dtype)
        )

    def _one_tile(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        rows, width = x.shape
        out = x.new_empty(rows, self.out_features, dtype=out_dtype)
        tall, wide, depth = (32, 32, 32) if x.dtype == torch.float32 else (64, 64, 64)
        grid = (triton.cdiv(rows, tall) * triton.cdiv(self.out_features, wide),)
        linear_kernel[grid](
            x, self.weight, self.weight if self.bias is None else self.bias, out, rows, N=self.out_features, K=width,
            BIASED=self.bias is not None, ROWS=tall, COLUMNS=wide, DEPTH=depth, num_warps=4, num_stages=4,
        )  # fmt: skip
        return out
