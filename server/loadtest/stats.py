"""Intervals: how far a figure from a few runs, or a share of a few requests, may be from the truth.

Knows nothing about load tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, nan, sqrt
from statistics import fmean, stdev

Z95 = 1.959964
# 97.5 % points of Student's t by degrees of freedom.
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval; the bounds are NaN where one value says nothing about spread."""

    value: float
    low: float
    high: float


def wilson(good: int, total: int) -> Interval:
    """The share good / total with Wilson's score interval."""
    if not total:
        return Interval(nan, 0.0, 1.0)
    share, z2 = good / total, Z95 * Z95
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with Student's interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, nan, nan)
    degrees = len(values) - 1
    t = T975[degrees - 1] if degrees <= len(T975) else Z95 + 2.5 / degrees
    half = t * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The geometric mean of the paired ratios above[i] / below[i], with its interval (Student's, on the logarithms).

    Pairs with a value that is not positive and finite say nothing about a ratio and are left out.
    """
    pairs = [(a, b) for a, b in zip(above, below, strict=True) if 0 < a < inf and 0 < b < inf]
    if not pairs:
        return Interval(nan, nan, nan)
    found = mean_interval([log(a / b) for a, b in pairs])
    return Interval(exp(found.value), exp(found.low), exp(found.high))
