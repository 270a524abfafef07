"""The highest rate at which a server still meets its SLO: doubling, then halving the gap.

Knows rates and shares of good requests, not how one probe is run: that is handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

from server.loadtest.stats import Interval, wilson

CLOSE = 1.05  # neighbouring rates this near are as good as one
LOWEST = 1 / 64  # of the first rate
MOST_LOOKS = 3
Prober = Callable[[float], Awaitable[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rate (requests per second) showed: good and sent requests, pooled over `looks` runs."""

    rate: float
    good: int
    sent: int
    looks: int = 1

    @property
    def share(self) -> Interval:
        return wilson(self.good, self.sent)

    def passed(self, attain: float) -> bool:
        return self.sent > 0 and self.good >= attain * self.sent

    def unsure(self, attain: float) -> bool:
        """The target lies inside the 95 % interval of the share."""
        return self.share.low < attain <= self.share.high


def hopeless(good: int, done: int, attain: float) -> bool:
    """After `done` requests the share is already surely below the target: no need to go on."""
    return done >= 20 and wilson(good, done).high < attain


def enough(attain: float) -> int:
    """The fewest requests of which all good put the whole interval above the target."""
    count = 1
    while wilson(count, count).low < attain:
        count += 1
    return count


async def find(probe: Prober, start: float, attain: float, spent: Callable[[], bool]) -> dict[str, Any]:
    """Search upwards or downwards from `start` until the gap is 5 % or `spent` says so; then the verdict."""
    probes: list[Probe] = []
    rate = start
    while not spent() and rate >= start * LOWEST:
        probes.append(await _look(probe, rate, attain, spent))
        low, high = bounds(probes, attain)
        if low and high:
            if high / low <= CLOSE:
                break
            rate = sqrt(low * high)
        else:
            rate = rate * 2 if low else rate / 2
    return verdict(probes, attain)


async def _look(probe: Prober, rate: float, attain: float, spent: Callable[[], bool]) -> Probe:
    """One rate, looked at again while it is unsure."""
    seen = Probe(rate, *await probe(rate))
    while seen.unsure(attain) and seen.looks < MOST_LOOKS and not spent():
        good, sent = await probe(rate)
        seen = replace(seen, good=seen.good + good, sent=seen.sent + sent, looks=seen.looks + 1)
    return seen


def bounds(probes: list[Probe], attain: float) -> tuple[float | None, float | None]:
    """The lowest rate that failed, and the highest that passed below it."""
    high = min((held.rate for held in probes if not held.passed(attain)), default=None)
    passed = [held.rate for held in probes if held.passed(attain) and (high is None or held.rate < high)]
    return max(passed, default=None), high


def verdict(probes: list[Probe], attain: float) -> dict[str, Any]:
    """The highest passing rate, with an interval from the last rate that surely passes to the first that surely fails.

    `surely`: the 95 % interval of the share lies wholly on that side of the target. A bound not reached is None.
    """
    low, high = bounds(probes, attain)
    surely_failed = [held.rate for held in probes if held.share.high < attain]
    ceiling = min(surely_failed, default=None)
    surely_passed = [
        held.rate for held in probes if held.share.low >= attain and (ceiling is None or held.rate < ceiling)
    ]
    ordered = sorted(probes, key=lambda held: held.rate)
    return {
        "rate": low, "first_failing_rate": high, "low": max(surely_passed, default=None), "high": ceiling,
        "attain": attain, "probes": [asdict(held) | {"share": asdict(held.share)} for held in ordered],
    }  # fmt: skip
