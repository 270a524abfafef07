"""When a load does not fit: for each setting the smallest change that makes it fit, and what that brings.

Knows no text beyond a setting's name: every answer is the same scenario evaluated with one value changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.kv_cost import DTYPE_BYTES
from server.plan.waterfall import Outcome, Scenario, evaluate, required_memory

SMALLER = {"dtype": ("bfloat16",), "kv_dtype": ("bfloat16", "int8")}
"""What the server takes in place of a larger type. Of the two 8-bit caches, int8 is the more exact."""
WORTH_NAMING = 0.05
"""A change that falls short is named if it brings at least this share of what is missing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting with its old and new value. factor: how many times smaller or larger the new one is.

    gain: bytes that one device then needs less of, or has more of. missing: what still lacks, 0 when it fits.
    """

    setting: str
    old: int | str
    new: int | str
    factor: float
    gain: int
    missing: int


def advise(scenario: Scenario, outcome: Outcome) -> list[Change]:
    """Changes that suffice by themselves, the smallest factor first; then those that help but fall short."""
    changes = [
        change
        for change in _changes(scenario, outcome)
        if change.missing == 0 or change.gain >= WORTH_NAMING * outcome.missing
    ]
    return sorted(changes, key=lambda change: (change.missing, change.factor))


def _changes(scenario: Scenario, outcome: Outcome) -> Iterator[Change]:
    if 0 < outcome.max_concurrency < scenario.concurrency:
        yield _change(scenario, outcome, "concurrency", outcome.max_concurrency)
    if 0 < outcome.max_context < scenario.context:
        yield _change(scenario, outcome, "context", outcome.max_context)
    yield from _first_that_fits(scenario, outcome, "kv_dtype", _smaller("kv_dtype", scenario.cache_dtype))
    yield from _first_that_fits(scenario, outcome, "dtype", _smaller("dtype", scenario.activation_dtype))
    halves = [scenario.page_size >> shift for shift in range(1, scenario.page_size.bit_length())]
    yield from _first_that_fits(scenario, outcome, "page_size", halves)
    left = scenario.memory - outcome.budget.fixed - outcome.needed
    if scenario.reserve is not None and left > 0:
        yield _change(scenario, outcome, "reserve", left)
    yield _change(scenario, outcome, "memory", required_memory(scenario, outcome))


def _first_that_fits(
    scenario: Scenario, outcome: Outcome, setting: str, values: Sequence[int | str]
) -> Iterator[Change]:
    """The first value that suffices, else the last: values go from little change to much."""
    changes = [_change(scenario, outcome, setting, value) for value in values]
    yield from [change for change in changes if not change.missing][:1] or changes[-1:]


def _change(scenario: Scenario, outcome: Outcome, setting: str, new: int | str) -> Change:
    update: dict[str, Any] = {setting: new}
    changed = evaluate(replace(scenario, **update))
    before, after = outcome.needed - outcome.budget.pool, changed.needed - changed.budget.pool
    old = {"kv_dtype": scenario.cache_dtype, "dtype": scenario.activation_dtype}.get(setting)
    old = getattr(scenario, setting) if old is None else old
    return Change(setting, old, new, _factor(old, new), before - after, changed.missing)


def _factor(old: int | str, new: int | str) -> float:
    a, b = (DTYPE_BYTES[value] if isinstance(value, str) else value for value in (old, new))
    return max(a, b) / min(a, b)


def _smaller(setting: str, now: str) -> list[str]:
    return [dtype for dtype in SMALLER[setting] if DTYPE_BYTES[dtype] < DTYPE_BYTES[now]]
