"""The live books of the cache: map, rows and totals against each other at every step of random traffic."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from model.kv_cost import KVGroup
from server.caller import Caller
from server.engine.messages import Abort, Query, StepOutput
from server.kv_map import KEPT, PageMap
from server.kv_views import COLUMNS, requests
from tests.fake_device import FULL, Rig, rig, windowed

GROUPS: list[tuple[KVGroup, ...]] = [(FULL,), (FULL, windowed(6)), (windowed(5),)]
ALL = Caller()


def view(engine: Rig, kind: str) -> dict[str, Any]:
    value = engine.engine.query(Query(1, kind)).value
    assert isinstance(value, dict)
    return value


class Traffic:
    """Submits with shared beginnings, aborts and uneven pauses, one step at a time."""

    def __init__(self, groups: tuple[KVGroup, ...], seed: int) -> None:
        self.engine = rig(pages=14, groups=groups)
        self._dice, self._submitted = random.Random(seed), 0

    def step(self, may_submit: bool = True) -> StepOutput:
        dice, engine = self._dice, self.engine
        engine.now[0] += dice.randrange(10**9)
        if may_submit and dice.random() < 0.4:
            self._submit()
        return engine.step()

    def abort(self) -> None:
        """Once in a while, and at the time of the last step. The next step reports it."""
        if self._dice.random() < 0.05:
            self.engine.engine.abort(Abort((f"r{self._dice.randrange(self._submitted + 1)}",)))

    def _submit(self) -> None:
        dice = self._dice
        prompt = [1 + dice.randrange(2)] * dice.randrange(9) + [
            dice.randrange(50) for _ in range(1 + dice.randrange(6))
        ]
        n, seed, max_tokens = 1 + dice.randrange(3), dice.randrange(99), 1 + dice.randrange(12)
        self.engine.submit(f"r{self._submitted}", prompt, n=n, seed=seed, max_tokens=max_tokens)
        self._submitted += 1


def shown(page_map: PageMap, caller: Caller = ALL) -> dict[tuple[int, int], tuple[int, list[str | None]]]:
    """(references, holders) of every page, read off the runs as a client would."""
    answer = page_map.show(page_map.everything(), caller)
    pages: dict[tuple[int, int], tuple[int, list[str | None]]] = {}
    for group in answer["groups"]:
        for first, count, references, held_by, _, _ in group["runs"]:
            holders = answer["held_by"][held_by] if held_by >= 0 else []
            pages |= {(group["group"], page): (references, holders) for page in range(first, first + count)}
    return pages


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_the_folded_map_is_the_pool(groups: tuple[KVGroup, ...], seed: int) -> None:
    traffic, page_map = Traffic(groups, seed), PageMap([15] * len(groups))
    engine = traffic.engine
    for _ in range(80):
        page_map.apply(traffic.step().kv_delta, now_s=5)
        seen = shown(page_map)
        for group, books in enumerate(view(engine, "kv_pages")["groups"]):
            for page in range(1, 15):
                expected = KEPT if page in books["cached"] else books["references"][page]
                assert seen[group, page][0] == expected
        rows = view(engine, "kv_requests")["requests"]
        held = Counter((group, page, r["id"]) for r in rows for group, t in enumerate(r["pages"]) for page in t if page)
        assert held == Counter((*place, holder) for place, (_, holders) in seen.items() for holder in holders)
        traffic.abort()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_sum_to_the_pool_at_every_step(groups: tuple[KVGroup, ...], seed: int) -> None:
    traffic = Traffic(groups, seed)
    engine = traffic.engine
    for _ in range(80):
        traffic.step()
        summary, books = view(engine, "kv_summary"), view(engine, "kv_requests")
        active = sum(group["active"] * group["page_bytes"] for group in summary["groups"])
        assert sum(row["share_weighted_bytes"] for row in books["requests"]) == books["active_bytes"] == active
        for row in books["requests"]:
            assert row["own_bytes"] + row["shared_bytes"] == row["bytes"] <= row["peak_bytes"]
        for group in summary["groups"]:
            assert group["active"] + group["cached"] + group["free"] == group["pages"]
        assert summary["slots_used"] <= summary["slots_allocated"]
        traffic.abort()


def test_three_holders_share_a_page_to_the_byte() -> None:
    """1024 bytes by three: 342, 341, 341."""
    engine = rig(pages=20, groups=(FULL,), page_size=8)
    engine.submit("a", [5] * 8, n=3, max_tokens=4)
    for _ in range(3):
        engine.step()
    rows = view(engine, "kv_requests")["requests"]
    assert [row["shared_pages"] for row in rows] == [1, 1, 1]
    page = engine.engine.tables.pools[0].page_bytes
    assert sorted(row["share_weighted_bytes"] - row["own_bytes"] for row in rows) == [
        page // 3, page // 3, page - 2 * (page // 3)
    ]  # fmt: skip


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(4))
def test_the_integral_of_the_pool_is_the_sum_of_all_bills(groups: tuple[KVGroup, ...], seed: int) -> None:
    """Used bytes integrated from outside, step by step, against requests' byte-seconds and idle cache: integers."""
    traffic = Traffic(groups, seed)
    engine, pools = traffic.engine, traffic.engine.engine.tables.pools
    active = cached = paid = last = 0
    step = 0
    while step < 150 or engine.engine.has_work:
        held = [(pool.num_active * pool.page_bytes, pool.num_cached * pool.page_bytes) for pool in pools]
        output = traffic.step(may_submit=step < 150)
        elapsed, last = engine.now[0] - last, engine.now[0]
        active += elapsed * sum(now for now, _ in held)
        cached += elapsed * sum(now for _, now in held)
        paid += sum(row.usage.kv_byte_ns for row in output.rows if row.usage)
        assert (output.stats.active_byte_ns, output.stats.cached_byte_ns) == (active, cached)
        owed = sum(row["byte_ns"] for row in view(engine, "kv_requests")["requests"])
        undivided = sum(max(0, count - 1) * pool.page_bytes for pool in pools for count in pool.references)
        assert 0 <= active - paid - owed <= undivided, "below one nanosecond a reference while pages are shared"
        step += 1
        traffic.abort()
    assert paid == active > 0 and cached > 0


def test_byte_seconds_are_carried_on_between_steps() -> None:
    engine = rig(pages=8)
    engine.submit("a", [3] * 9, max_tokens=2)
    stats = [engine.step() for _ in range(3)][-1].stats
    assert stats.cached_bytes > 0 == stats.active_bytes
    engine.now[0] += 1000
    summary = view(engine, "kv_summary")
    truth = [sum(g[f"{state}_byte_ns"] for g in summary["groups"]) for state in ("active", "cached")]
    assert list(stats.byte_ns_at(engine.now[0])) == truth


def test_usage_is_vllms_definition() -> None:
    """1 - free / total, where evictable cached pages count as free and the null page does not count."""
    engine = rig(pages=10)
    engine.submit("a", [3] * 9, max_tokens=1)
    engine.run()
    engine.submit("b", [4] * 5, max_tokens=9)
    stats = engine.step().stats
    pool = engine.engine.tables.pools[0]
    assert pool.num_cached == 2 and pool.num_active == 2
    total = stats.pages_active + stats.pages_cached + stats.pages_free
    assert stats.pages_active / total == pytest.approx(1 - pool.available / (pool.num_pages - 1)) == 0.2


def test_a_tenant_sees_its_rows_and_one_sum_of_the_others() -> None:
    engine = rig(pages=20)
    for index, tenant in enumerate(["t0", "t1", "t1", "t0", ""]):
        engine.submit(f"r{index}", [7] * 4 + [index] * 3, tenant=tenant, max_tokens=9)
    engine.step()
    engine.step()
    books = view(engine, "kv_requests")
    mine = requests(books, Caller("t0", sees_all=False))
    assert [row["id"] for row in mine["requests"]] == ["r0", "r3"]
    assert "r1" not in str(mine) and "t1" not in str(mine)
    assert mine["others"]["count"] == 3
    for column in COLUMNS:
        assert sum(row[column] for row in mine["requests"]) + mine["others"][column] == pytest.approx(
            mine["totals"][column]
        )
    assert mine["totals"]["share_weighted_bytes"] == mine["active_bytes"]
    everything = requests(books, ALL)
    assert len(everything["requests"]) == 5 and everything["others"] is None
    assert everything["totals"] == mine["totals"]


def test_a_tenants_map_hides_the_names_of_others() -> None:
    engine, page_map = rig(pages=20), PageMap([21])
    for index, tenant in enumerate(["t0", "t1"]):
        engine.submit(f"r{index}", [7] * 9, tenant=tenant, max_tokens=3)
        page_map.apply(engine.step().kv_delta, now_s=5)
    mine = shown(page_map, Caller("t1", sees_all=False)).values()
    assert {holder for _, holders in mine for holder in holders} == {"r1", None}
    assert sorted(references for references, _ in mine) == sorted(
        references for references, _ in shown(page_map).values()
    )
    shared = next(holders for references, holders in mine if references == 2)
    assert shared == [None, "r1"]


def test_hits_count_until_the_content_goes() -> None:
    engine, page_map = rig(pages=3, page_size=4), PageMap([4])
    for _ in range(3):
        engine.submit("a", [7] * 5, max_tokens=1)
        while engine.engine.has_work:
            page_map.apply(engine.step().kv_delta, now_s=5)
    runs = page_map.show(page_map.everything(), ALL)["groups"][0]["runs"]
    assert [KEPT, -1, 2, 5] in [run[2:] for run in runs]
    engine.submit("b", [9] * 11, max_tokens=1)
    while engine.engine.has_work:
        page_map.apply(engine.step().kv_delta, now_s=6)
    runs = page_map.show(page_map.everything(), ALL)["groups"][0]["runs"]
    assert all(run[4] == 0 for run in runs)
