"""Who gets pages, who gives them back and which of them others may find: where a slip costs speed or memory, no token.

The fake device would notice foreign pages; here every answer is right, and what it cost is looked at.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.fake_device import FULL, finishes, rig, windowed
from tests.test_scheduler import admission_order, prompt_of


def test_a_victim_comes_back_before_those_who_never_ran() -> None:
    engine = rig(pages=10, max_num_seqs=2, budget=64)
    for index, name in enumerate(("first", "victim", "later")):
        engine.submit(name, prompt_of(12, index), max_tokens=12)
    engine.run()
    steps = [[name for name, *_ in plan] for plan in engine.device.plans]
    begins = [name for before, now in pairwise([[], *steps]) for name in now if name not in before]
    assert begins == ["first", "victim", "victim", "later"]


def test_pages_promised_to_a_prompt_that_is_still_read_are_not_given_away() -> None:
    """Prompt log-probabilities are scored few rows a step, so others have room to start meanwhile."""
    engine = rig(pages=16, budget=16, prompt_logits=4)
    engine.submit("scored", prompt_of(40), prompt_logprobs=0, max_tokens=2)
    engine.submit("fits", prompt_of(8, 1), max_tokens=2)
    engine.submit("waits", prompt_of(30, 2), max_tokens=2)
    rows = engine.run()
    assert admission_order(engine) == ["scored", "fits", "waits"] and set(finishes(rows).values()) == {"length"}
    assert engine.engine.scheduler.num_preemptions == 0
    assert not any({"scored", "waits"} <= {name for name, *_ in plan} for plan in engine.device.plans)


def test_the_front_of_a_prompt_stays_longest() -> None:
    """Conversations and system prompts are shared from the front: its end is what nobody asks for again."""
    engine = rig(pages=8)
    engine.submit("old", prompt_of(24), max_tokens=1)
    engine.run()
    engine.submit("new", prompt_of(16, 1), max_tokens=1)
    engine.run()
    engine.submit("again", prompt_of(24), max_tokens=1)
    assert engine.run()[0].cached_tokens == 16


def test_a_step_that_is_still_computed_shares_nothing() -> None:
    """It may yet end in NaN or without memory, and who had found its pages would have to end with it."""
    engine = rig(overlaps=True, budget=8)
    engine.submit("a", prompt_of(16), max_tokens=4)
    engine.step()
    engine.step()  # the first chunk is collected, the second one launched
    engine.submit("b", prompt_of(16), max_tokens=4)
    rows = engine.run()
    assert next(row.cached_tokens for row in rows if row.id == "b") == 8


@pytest.mark.fault
def test_pages_that_were_sound_are_forgotten_with_those_that_turned_to_nan() -> None:
    """What made the model go wrong may lie in any of them."""
    engine = rig(budget=8)
    engine.device.fault = lambda row: "nan" if row.sequence.request.id == "bad" and row.end > 8 else None
    for name in ("bad", "again"):
        engine.submit(name, prompt_of(16), max_tokens=2)
        rows = engine.run()
    assert [row.cached_tokens for row in rows] == [0, None] and rows[-1].finish == "length"


def test_a_windowed_group_holds_what_somebody_sees_and_no_page_more() -> None:
    """Looked at whenever a page is begun: only then are others given back."""
    engine = rig(pages=(40, 40), groups=(FULL, windowed(5)), budget=8)
    engine.submit("a", prompt_of(30), max_tokens=30)
    for _ in range(30):
        engine.step()
        ((_, _, start, end),) = engine.device.plans[-1]
        seen = {position // 4 for position in range(max(0, start - 4), end)}
        assert start % 4 or engine.engine.tables.pools[1].num_active == len(seen), (start, end)
