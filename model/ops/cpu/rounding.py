"""How weights are rounded to 8 and 4 bits: whole numbers and the scales that they are multiplied by.

Knows no layout. GROUP inputs share a scale, once they are turned by a Hadamard matrix; activations are treated alike in
csrc/round_group.h, so products keep their value, and one large input does not cost its neighbours their digits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64
"""Inputs that share a scale and are turned together; a square, so that the turn divides by a whole number."""
SHRINKINGS = (1.0, 0.9, 0.8)
"""4-bit scales of a group that are tried, relative to the one at which nothing is cut off."""


def turned_groups(values: Tensor) -> Tensor:
    """[N, K] f32 -> [N, groups, GROUP] f32, zeros beyond K: values times the symmetric, orthonormal Hadamard matrix."""
    groups = F.pad(values, (0, -values.shape[1] % GROUP)).view(values.shape[0], -1, GROUP)
    apart = 1
    while apart < GROUP:  # the same order as csrc/round_group.h
        first, second = groups.view(*groups.shape[:2], -1, 2, apart).unbind(3)
        groups = torch.stack((first + second, first - second), 3).flatten(2)
        apart *= 2
    return groups.div_(GROUP**0.5)


def rounded_to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[N, groups, GROUP] f32 -> whole numbers from -127 to 127, f32 as groups, and [N, groups] bf16 scales."""
    scale = (groups.abs().amax(2) / 127).to(torch.bfloat16)
    return (groups / _divisor(scale)).round_(), scale


def rounded_to_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As rounded_to_int8, from -8 to 7: the largest weight becomes -8 or is cut off, by the least squares."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    best, least = torch.zeros_like(largest, dtype=torch.bfloat16), torch.full_like(largest, torch.inf)
    for shrinking in SHRINKINGS:
        scale = (largest * (shrinking / -8)).to(torch.bfloat16)
        error = int4_codes(groups, scale).mul_(scale.float().unsqueeze(2)).sub_(groups).square_().sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return int4_codes(groups, best), best


def int4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest whole numbers from -8 to 7; f32 as groups."""
    return (groups / _divisor(scale)).round_().clamp_(-8, 7)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale.float()).unsqueeze(2)


ROUNDINGS = {8: rounded_to_int8, 4: rounded_to_int4}
"""Bits -> the rounding."""
