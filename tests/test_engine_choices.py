"""One choice that is ended while the others go on: who hears of it, who computes on, who pays."""

from __future__ import annotations

import pytest

from server.engine.messages import Abort, Row
from tests.fake_device import Rig, expected, finishes, outputs, rig
from tests.test_scheduler import prompt_of


def billed(rows: list[Row]) -> int:
    return sum(row.usage.kv_byte_ns for row in rows if row.usage)


def held(engine: Rig) -> int:
    """Byte-nanoseconds that pages were in use."""
    return sum(pool.page_bytes * pool.ledger.active_ns for pool in engine.engine.tables.pools)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_a_choice_that_is_ended_costs_the_others_nothing(choice: int, overlaps: bool) -> None:
    engine = rig(overlaps=overlaps)
    params = engine.submit("a", prompt_of(6), n=3, max_tokens=9)
    rows = [*engine.step().rows, *engine.step().rows]
    engine.engine.abort(Abort((), choices=(("a", choice), ("a", 7), ("unknown", 0))))
    rows += engine.run()
    whole = {("a", index): expected(prompt_of(6), params, index) for index in range(3)}
    assert finishes(rows) == {key: "abort" if key == ("a", choice) else "length" for key in whole}
    found = outputs(rows)
    cut = found.pop(("a", choice))
    assert found == {key: tokens for key, tokens in whole.items() if key in found}
    assert cut == whole["a", choice][: len(cut)] and 1 <= len(cut) <= 2
    assert billed(rows) == held(engine)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_choice_without_a_row_goes_on_since_the_others_may_need_its_prompt(steps: int) -> None:
    engine = rig(budget=4)
    params = engine.submit("a", prompt_of(6), n=2, max_tokens=5)
    rows = [row for _ in range(steps) for row in engine.step().rows]
    engine.engine.abort(Abort((), choices=(("a", 0), ("a", 1))))
    rows += engine.run()
    assert outputs(rows) == {("a", choice): expected(prompt_of(6), params, choice) for choice in range(2)}
    assert set(finishes(rows).values()) == {"length"}


@pytest.mark.parametrize("steps", [2, 4])
def test_an_aborted_best_of_pays_for_every_choice_that_ran(steps: int) -> None:
    engine = rig()
    engine.submit("a", prompt_of(6), n=2, best_of=5, max_tokens=9)
    rows = [row for _ in range(steps) for row in engine.step().rows]
    engine.engine.abort(Abort(("a",)))
    rows += engine.run()
    assert finishes(rows) == {("a", 0): "abort", ("a", 1): "abort"}
    assert billed(rows) == held(engine) > 0
