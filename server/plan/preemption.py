"""The chance that requests of varying length outgrow the pool: the distribution of the pages they need.

Knows nothing of models: it is given what equally likely requests need of each group of pages, and what there is.

Requests are independent. The chance is that `concurrency` of them, each at its full length, need more pages than some
group has. They reach their full length at different moments and may share a prefix, so this bounds the share of time
in which requests are preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from operator import mul

CELLS = 512
"""A group of more pages is cut into this many cells: finer sums would cost time, coarser ones accuracy."""

Cells = list[float]
"""Probability of a sum of needs, by cell. What exceeds the pool is dropped, so the cells add up to less than 1."""


class Overflow:
    """Sums of equally likely needs, for any number of requests: convolutions of 1, 2, 4, ... are kept."""

    def __init__(self, needs: Sequence[Sequence[int]], pools: Sequence[int]) -> None:
        """needs[g]: pages of group g that each of the equally likely requests takes; pools[g]: pages there are."""
        self._powers = [[_on_grid(need, pool) for need, pool in zip(needs, pools, strict=True)]]
        self._nobody = [[1.0] + [0.0] * (len(cells) - 1) for cells in self._powers[0]]

    def chance(self, concurrency: int) -> float:
        """Probability, 0 to 1, that this many requests need more than there is."""
        total = self._nobody
        for bit in range(concurrency.bit_length()):
            if concurrency >> bit & 1:
                total = _add(total, self._power(bit))
        return _overflow(total)

    def most_within(self, limit: float) -> int:
        """The most requests whose chance is at most limit (below 1); 0 if one alone exceeds it."""
        bits = 0
        while _overflow(self._power(bits)) <= limit:
            bits += 1
        count, total = 0, self._nobody
        for bit in reversed(range(bits)):
            trial = _add(total, self._power(bit))
            if _overflow(trial) <= limit:
                count, total = count + (1 << bit), trial
        return count

    def _power(self, bit: int) -> list[Cells]:
        while len(self._powers) <= bit:
            self._powers.append(_add(self._powers[-1], self._powers[-1]))
        return self._powers[bit]


def _on_grid(needs: Sequence[int], pool: int) -> Cells:
    """In units that divide every need; with more units than CELLS, each need is split so that its mean is kept."""
    unit = gcd(*needs)
    units = pool // unit
    size = min(units, CELLS)
    cells = [0.0] * (size + 1)
    weight = 1.0 / len(needs)
    for need in needs:
        if need > pool:
            continue
        cell, part = divmod(need // unit * size, units)
        cells[cell] += weight * (1 - part / units)
        if part:
            cells[cell + 1] += weight * part / units
    return cells


def _add(left: list[Cells], right: list[Cells]) -> list[Cells]:
    return [_convolve(a, b) for a, b in zip(left, right, strict=True)]


def _convolve(left: Cells, right: Cells) -> Cells:
    backwards, last = right[::-1], len(right) - 1
    return [sum(map(mul, left[: cell + 1], backwards[last - cell :])) for cell in range(last + 1)]


def _overflow(total: list[Cells]) -> float:
    """Sum over the groups: the same long requests strain them all, so this bounds the chance from above."""
    return min(1.0, sum(max(0.0, 1.0 - sum(cells)) for cells in total))
