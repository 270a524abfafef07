"""How weights are rounded to 8 and 4 bits: whole numbers, and the factors that make weights of them again.

Knows no layout. 8 bits: groups of 64 inputs share a scale, once they are turned by a Hadamard matrix; round_group.h
turns activations, so products keep their value, and one large input does not cost its neighbours their digits.
4 bits: groups of 32 inputs as they came share a scale and a minimum, as in GGUF's Q4_1, whose weights stay nearly as
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUPS = {8: 64, 4: 32}
"""Bits -> inputs that share a scale."""
SHRINKINGS = (1.0, 0.95, 0.9)
"""Ranges of a 4-bit group that are tried, relative to the one at which nothing is cut off."""
LEVELS = 15
"""The largest 4-bit code."""


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] f32 -> [N, groups, 64] uint8 codes and [N, groups, 1] bf16 scales: (code - 128) * scale, turned."""
    groups = turned(in_groups(weight, GROUPS[8]))
    scale = (groups.abs().amax(2, keepdim=True) / 127).to(torch.bfloat16)
    return (groups / _divisor(scale)).round_().add_(128).to(torch.uint8), scale


def rounded_to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] f32 -> [N, groups, 32] uint8 codes to 15 and [N, groups, 2] bf16: code * scale + minimum."""
    groups = in_groups(weight, GROUPS[4])
    low, high = groups.aminmax(dim=2, keepdim=True)
    best = torch.zeros((*groups.shape[:2], 2), dtype=torch.bfloat16)
    least = torch.full_like(low, torch.inf)
    for shrinking in SHRINKINGS:
        factors = _int4_factors(low, high, shrinking)
        error = restored_int4(int4_codes(groups, factors), factors).sub_(groups).square_().sum(2, keepdim=True)
        best, least = torch.where(error < least, factors, best), torch.minimum(error, least)
    return int4_codes(groups, best).to(torch.uint8), best


def _int4_factors(low: Tensor, high: Tensor, shrinking: float) -> Tensor:
    """The scale and minimum [N, groups, 2] bf16 of a range that is cut at both ends."""
    scale = ((high - low) * (shrinking / LEVELS)).to(torch.bfloat16)
    minimum = (low + high) / 2 - scale.float() * (LEVELS / 2)
    return torch.cat((scale, minimum.to(torch.bfloat16)), 2)


def int4_codes(groups: Tensor, factors: Tensor) -> Tensor:
    """The nearest whole numbers from 0 to 15, f32 as groups."""
    return ((groups - factors[..., 1:].float()) / _divisor(factors[..., :1])).round_().clamp_(0, LEVELS)


def restored_int4(codes: Tensor, factors: Tensor) -> Tensor:
    """What codes stand for; f32 as groups."""
    return codes * factors[..., :1].float() + factors[..., 1:].float()


def in_groups(values: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, groups, group], zeros beyond K."""
    return F.pad(values, (0, -values.shape[1] % group)).view(values.shape[0], -1, group)


def turned(groups: Tensor) -> Tensor:
    """Each group [.., G] times the symmetric, orthonormal Hadamard matrix; G is a power of 4, so dividing is exact."""
    width, apart = groups.shape[2], 1
    while apart < width:  # the same order as csrc/round_group.h
        first, second = groups.view(*groups.shape[:2], -1, 2, apart).unbind(3)
        groups = torch.stack((first + second, first - second), 3).flatten(2)
        apart *= 2
    return groups.div_(width**0.5)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale.float())


ROUNDINGS = {8: rounded_to_int8, 4: rounded_to_int4}
"""Bits -> the rounding."""
