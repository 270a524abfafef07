"""When requests are meant to start: offsets in seconds from the beginning of a run, computed before it begins.

Knows nothing about what is sent. One construction serves all shapes: gaps of mean 1 are summed and mapped through the
inverse of the expected number of arrivals by time t, so a ramp can be Poisson as well as constant.
The sum is scaled so that the last arrival lands exactly where the expected count reaches n: the offered rate is the
rate asked for, with no drift from seed to seed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt
from random import Random


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rate in requests per second, moving linearly from `start` to `stop`; `shape` is that of gamma-distributed gaps.

    shape 1 is a Poisson process, below 1 is burstier, above 1 smoother, infinite is constant.
    """

    start: float
    stop: float
    shape: float = 1.0

    def offsets(self, seconds: float, rng: Random, limit: int | None = None) -> array[float]:
        """The offsets of a run of `seconds`, or of its first `limit` requests."""
        expected = round((self.start + self.stop) / 2 * seconds)
        count = expected if limit is None else min(expected, limit)
        sums = list(accumulate(self._gap(rng) for _ in range(count)))
        scale = count / sums[-1] if sums else 1.0
        return array("d", (self._moment(total * scale, seconds) for total in sums))

    def seconds_for(self, count: int) -> float:
        """How long `count` arrivals take."""
        return 2 * count / (self.start + self.stop)

    def _gap(self, rng: Random) -> float:
        return 1.0 if self.shape == inf else rng.gammavariate(self.shape, 1 / self.shape)

    def _moment(self, expected: float, seconds: float) -> float:
        """The time t at which start * t + (stop - start) * t^2 / (2 * seconds) = expected."""
        slope = (self.stop - self.start) / seconds
        if slope == 0:
            return expected / self.start
        root = sqrt(max(0.0, self.start * self.start + 2 * slope * expected))
        return (root - self.start) / slope


def parse_shape(text: str) -> float:
    """`poisson`, `constant` or `gamma:SHAPE`."""
    if text in ("poisson", "constant"):
        return 1.0 if text == "poisson" else inf
    name, _, value = text.partition(":")
    try:
        shape = float(value)
    except ValueError:
        shape = 0.0
    if name != "gamma" or not shape > 0:
        raise ValueError(f"arrivals {text!r}: expected poisson, constant or gamma:SHAPE with SHAPE > 0")
    return shape
