"""How long requests are: lognormal through two percentiles, as equally likely lengths.

Knows nothing of pages or memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LENGTHS = 2048
"""Equally likely lengths that stand for the distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Half of all requests are at most p50 tokens long, 95 % at most p95."""

    p50: int
    p95: int

    def share_over(self, context: int) -> float:
        """How many of all requests would be longer than `context` tokens, which none can be."""
        from statistics import NormalDist

        if self.p50 == self.p95:
            return float(self.p50 > context)
        return 1 - NormalDist().cdf(math.log(context / self.p50) / self._spread())

    def _spread(self) -> float:
        from statistics import NormalDist

        return math.log(self.p95 / self.p50) / NormalDist().inv_cdf(0.95)

    def values(self, context: int) -> list[int]:
        """LENGTHS equally likely lengths in tokens, none over the context."""
        from statistics import NormalDist  # a slow import, for those who ask

        normal, spread = NormalDist(), self._spread()
        quantiles = (normal.inv_cdf((index + 0.5) / LENGTHS) for index in range(LENGTHS))
        return [max(1, min(context, round(self.p50 * math.exp(spread * z)))) for z in quantiles]
