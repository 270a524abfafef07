"""The search for the capacity against servers whose capacity is known, and the intervals it rests on."""

from __future__ import annotations

import asyncio
from math import isnan
from random import Random

import pytest

from server.loadtest.capacity import enough, find, hopeless
from server.loadtest.compare import as_rows
from server.loadtest.stats import mean_interval, ratio_interval, wilson


@pytest.mark.parametrize(
    ("good", "total", "low", "high"), [(95, 100, 0.8882, 0.9785), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)]
)
def test_wilson(good: int, total: int, low: float, high: float) -> None:
    """The values of the textbook formula (as statsmodels gives them)."""
    found = wilson(good, total)
    assert [found.value, found.low, found.high] == pytest.approx([good / total, low, high], abs=1e-4)


def test_students_interval() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4843, 2 + 2.4843), abs=1e-3)
    assert isnan(mean_interval([5.0]).low)


def test_a_ratio_is_paired_by_round() -> None:
    """Rounds differ tenfold, the ratio within a round hardly: pairing keeps the interval narrow."""
    base = [1.0, 10.0, 3.0, 7.0]
    found = ratio_interval([value * factor for value, factor in zip(base, (2.0, 2.02, 1.98, 2.0), strict=True)], base)
    assert found.value == pytest.approx(2.0, rel=0.01)
    assert 1.9 < found.low < 2.0 < found.high < 2.1
    assert isnan(ratio_interval([0.0], [1.0]).value)


def sharp(capacity: float, seen: list[float]) -> object:
    async def probe(rate: float) -> tuple[int, int]:
        seen.append(rate)
        return (100, 100) if rate <= capacity else (50, 100)

    return probe


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 200.0])
def test_finds_a_sharp_capacity(capacity: float) -> None:
    seen: list[float] = []
    found = asyncio.run(find(sharp(capacity, seen), 1.0, 0.95, lambda: False))  # type: ignore[arg-type]
    assert capacity / 1.05 <= found["rate"] <= capacity
    assert found["low"] <= capacity < found["high"] <= capacity * 1.05
    assert len(seen) < 20


def test_a_soft_capacity_lies_in_its_interval() -> None:
    """Attainment falls slowly from 1 at 8/s to 0.9 at 12/s: 95 % at 10/s. Drawn at random, pooled over looks."""
    rng = Random(5)

    async def probe(rate: float) -> tuple[int, int]:
        truth = min(1.0, max(0.0, 1 - 0.025 * max(0.0, rate - 8)))
        return sum(rng.random() < truth for _ in range(200)), 200

    found = asyncio.run(find(probe, 1.0, 0.95, lambda: False))
    assert found["low"] <= 10 <= found["high"]


def test_a_hopeless_server_and_a_spent_budget_end_the_search() -> None:
    async def never(rate: float) -> tuple[int, int]:
        return 0, 30

    found = asyncio.run(find(never, 4.0, 0.95, lambda: False))
    assert (found["rate"], found["low"]) == (None, None)
    looks = iter([False, False, True, True, True])
    seen: list[float] = []
    cut = asyncio.run(find(sharp(1e9, seen), 1.0, 0.95, lambda: next(looks)))  # type: ignore[arg-type]
    assert (cut["rate"], cut["high"], seen) == (2.0, None, [1.0, 2.0])


def test_when_to_stop_and_how_many_are_enough() -> None:
    assert not hopeless(10, 19, 0.95)
    assert hopeless(12, 20, 0.95)
    assert not hopeless(93, 100, 0.95)
    assert wilson(enough(0.95), enough(0.95)).low >= 0.95 > wilson(enough(0.95) - 1, enough(0.95) - 1).low


def test_comparison_rows_pair_rounds_and_name_the_base() -> None:
    def run(server: str, number: int, ttft: float) -> dict[str, object]:
        latency = {"p50": ttft, "p99": ttft * 2}
        return {"label": "concurrency 4", "server": server, "round": number, "rates": {"request_rate": 1 / ttft},
                "latency": {"ttft": latency, "tpot": {}, "itl": {}, "e2e": {}}}  # fmt: skip

    runs = [run("A", 0, 0.1), run("B", 0, 0.2), run("B", 1, 0.44), run("A", 1, 0.2)]
    rows = {(row["server"], row["figure"]): row for row in as_rows(runs)}
    assert rows["B", "TTFT p50"]["ratio"][0] == pytest.approx((2.0 * 2.2) ** 0.5)
    assert rows["A", "TTFT p50"]["ratio"] is None
    assert rows["B", "requests/s"]["base"] == "A"
    assert ("A", "TPOT p50") not in rows
