"""The computed chance of preemption against a simulation of the model that docs/plan.md describes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from server.plan.lengths import Lengths
from server.plan.preemption import Overflow

PAGE = 16
CONTEXT = 16384


def sampled_lengths(lengths: Lengths, shape: tuple[int, int]) -> NDArray[np.float64]:
    spread = math.log(lengths.p95 / lengths.p50) / 1.6448536269514722
    normal = np.random.default_rng(5).standard_normal(shape)
    return np.clip(np.round(lengths.p50 * np.exp(spread * normal)), 1, CONTEXT)


def simulated(lengths: Lengths, concurrency: int, pool: int) -> float:
    trials = 2_000_000 // concurrency
    pages = np.ceil(sampled_lengths(lengths, (trials, concurrency)) / PAGE).sum(axis=1)
    return float((pages > pool).mean())


def overflow(lengths: Lengths, pool: int) -> Overflow:
    return Overflow([[-(-length // PAGE) for length in lengths.values(CONTEXT)]], [pool])


@pytest.mark.parametrize(
    ("concurrency", "pool"), [(1, 400), (2, 600), (3, 900), (8, 1300), (32, 3600), (64, 6900), (256, 24500)]
)
def test_chance_agrees_with_simulation(concurrency: int, pool: int) -> None:
    lengths = Lengths(1000, 4000)
    expected = simulated(lengths, concurrency, pool)
    assert expected > 0.005
    noise = 4 * math.sqrt(expected * concurrency / 2_000_000)
    assert overflow(lengths, pool).chance(concurrency) == pytest.approx(expected, rel=0.1, abs=noise)


def test_equal_lengths_overflow_exactly_when_one_more_page_is_needed() -> None:
    for pool, most in ((100, 5), (119, 5), (8_019, 400)):  # 20 pages each
        equal = overflow(Lengths(320, 320), pool)
        assert (equal.chance(most), equal.chance(most + 1)) == pytest.approx((0, 1), abs=1e-9)
        assert equal.most_within(0.01) == most


def test_percentiles_are_those_asked_for_and_the_context_cuts() -> None:
    values = Lengths(800, 6000).values(CONTEXT)
    assert values == sorted(values)
    assert abs(np.quantile(values, 0.5) - 800) < 3
    assert abs(np.quantile(values, 0.95) - 6000) < 40
    assert max(Lengths(800, 6000).values(2048)) == 2048


def test_most_within_is_the_last_that_keeps_the_limit() -> None:
    requests = overflow(Lengths(500, 3000), pool=3000)
    for limit in (0.001, 0.01, 0.2):
        most = requests.most_within(limit)
        assert requests.chance(most) <= limit < requests.chance(most + 1)


def test_chance_rises_with_requests_and_a_request_beyond_the_pool_always_overflows() -> None:
    requests = overflow(Lengths(500, 3000), pool=900)
    chances = [requests.chance(count) for count in range(1, 30)]
    assert chances == sorted(chances)
    assert overflow(Lengths(8000, 8000), pool=499).chance(1) == 1.0
    assert overflow(Lengths(8000, 8000), pool=499).most_within(0.5) == 0
    assert Overflow([[1, 2]], [0]).chance(1) == 1.0


def test_groups_of_pages_add_their_chances() -> None:
    def pages(size: int) -> list[int]:
        return [-(-length // size) for length in Lengths(500, 3000).values(CONTEXT)]

    one, two = Overflow([pages(16)], [900]), Overflow([pages(8)], [1700])
    both = Overflow([pages(16), pages(8)], [900, 1700])
    for count in (4, 12):
        assert both.chance(count) == pytest.approx(min(1.0, one.chance(count) + two.chance(count)))
