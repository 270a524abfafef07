"""Matrix products whose rows do not depend on how many rows there are.

Knows no layers. Measured with torch 2.13: oneDNN over reordered fp32 weights gives a row the same bits for every number
of rows from 2 on, and on AVX2 from 1 on (AVX-512 sums long single rows in pieces); torch's own linear does so for
multiples of 4 rows. Fewer are padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_MULTIPLE = 4
FEWEST_REORDERED = 2
HEAD_BLOCK = 4096
"""Rows of a half-precision weight that are widened at a time where fp32 output is asked for."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weights as they came, on any device."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return self.weight is tensor

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, -rows % ROW_MULTIPLE))
        if out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)[:rows]
        return self._widened(x.to(out_dtype))[:rows]

    def _widened(self, x: Tensor) -> Tensor:
        """Products and sums in x's dtype, of weights widened a block at a time."""
        parts = [F.linear(x, block.to(x.dtype)) for block in torch.split(self.weight, HEAD_BLOCK)]
        out = torch.cat(parts, dim=1)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """fp32 weights on a CPU, in oneDNN's blocked order."""

    weight: Tensor  # [N, K], opaque
    bias: Tensor | None  # [N]
    nbytes: int

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def shares(self, tensor: Tensor) -> bool:
        return False

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert out_dtype == x.dtype == torch.float32
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, max(0, FEWEST_REORDERED - rows)))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out[:rows]


def pack(weight: Tensor, bias: Tensor | None) -> PlainLinear | ReorderedLinear:
    """weight [N, K], bias [N]."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not has_onednn:
        return PlainLinear(weight, bias)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
    nbytes = torch.ops.mkldnn._nbytes(reordered) + (0 if bias is None else bias.nbytes)
    return ReorderedLinear(reordered, bias, nbytes)
