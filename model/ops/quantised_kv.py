"""Keys and values in 8 bits with one fp32 scale per token and head, in plain torch: the oracle of other backends.

Knows no pages: rows in, rows out. A row's scale comes from that row alone, so nothing of a row reaches another one.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest magnitude of a row becomes. int8 leaves -128 out, so that zero stays in the middle."""


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [..., d] of any float dtype -> (values [..., d] of dtype, scale [...] f32), with rows ~ values * scale.

    scale = amax / 127 (int8) or amax / 448 (fp8), values rounded to nearest even. A row of zeros has scale 0; a row
    with NaN or inf has a scale of NaN or inf and reads back as NaN, every channel of it.
    """
    wide, largest = rows.float(), LARGEST[dtype]
    scale = wide.abs().amax(-1) / largest
    # 0 / 0 and inf / inf are NaN, which has no integer; rounding of a subnormal scale can leave the range
    steps = (wide / scale.unsqueeze(-1)).nan_to_num_(0.0).clamp_(-largest, largest)
    return (steps.round_() if dtype == torch.int8 else steps).to(dtype), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., d], scale [...] -> f32 [..., d]."""
    return values.float() * scale.unsqueeze(-1)
