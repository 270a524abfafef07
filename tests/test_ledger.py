"""The bill for KV memory: exact to the nanosecond, whoever shares what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.engine.ledger import Ledger
from server.engine.pages import PagePool, page_key, root_key
from tests.fake_device import FULL, rig, windowed


def test_two_holders_pay_half_each_and_a_lone_one_pays_all() -> None:
    ledger = Ledger(2, 0)
    assert ledger.settle(1, 0) == 0  # first holder comes
    ledger.advance(10, 1, 0)
    second_from = ledger.settle(1, 1)  # second one comes
    ledger.advance(30, 1, 0)
    first_until = ledger.settle(1, 2)  # the first one leaves
    ledger.advance(35, 1, 0)
    second_until = ledger.settle(1, 1)
    assert (first_until - 0, second_until - second_from) == (20, 15)
    assert ledger.active_ns == 35


def test_idle_time_is_nobodys() -> None:
    ledger = Ledger(2, 0)
    ledger.settle(1, 0)
    ledger.advance(5, 1, 0)
    paid = ledger.settle(1, 1)
    ledger.advance(100, 0, 1)
    assert ledger.settle(1, 0) == paid == 5
    assert (ledger.active_ns, ledger.cached_ns) == (5, 95)


def test_what_does_not_divide_is_carried_into_the_next_interval() -> None:
    ledger = Ledger(2, 0)
    ledger.settle(1, 0)
    ledger.advance(0, 1, 0)
    start = ledger.settle(1, 1)
    ledger.settle(1, 2)
    ledger.advance(10, 1, 0)
    third = ledger.settle(1, 3)  # 10 ns by three: 3 each, 1 left
    assert third - start == 3
    ledger.advance(13, 1, 0)
    second = ledger.settle(1, 2)  # 3 + 1 left, by two
    first = ledger.settle(1, 1)
    assert second - third == 2
    assert 3 * (third - start) + 2 * (second - third) + (first - second) == 13


Event = tuple[str, int, int]
EVENTS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "drop", "keep"]), st.integers(0, 7), st.integers(0, 1000)), max_size=80
)


@given(EVENTS)
def test_holders_and_cache_add_up_to_the_pool_exactly(events: list[Event]) -> None:
    """Every page-nanosecond of an active page is paid by somebody, none twice."""
    pool = PagePool(6, 100)
    held: list[tuple[int, int]] = []  # (page, h at acquire)
    paid = now = keys = 0
    for kind, which, elapsed in [*events, *[("drop", 0, 13)] * len(events)]:
        now += elapsed
        pool.advance(now)
        if kind == "take" and pool.available:
            page = pool.allocate()
            held.append((page, pool.held(page)))
        elif kind == "share" and held:
            page = held[which % len(held)][0]
            pool.share(page)
            held.append((page, pool.held(page)))
        elif kind == "keep" and held:
            keys += 1
            pool.register(held[which % len(held)][0], page_key(root_key(""), bytes([keys])))
        elif kind == "drop" and held:
            page, since = held.pop(which % len(held))
            paid += pool.held(page) - since
            pool.release(page)
    assert not held
    assert paid == pool.ledger.active_ns
    pool.advance(now + 17)
    assert pool.ledger.active_ns == paid


def test_requests_and_idle_cache_add_up_to_the_pool_integral() -> None:
    """Rows of ended requests against the page count integrated step by step, on a pool with two groups and sharing."""
    engine = rig(pages=20, groups=(FULL, windowed(6)))
    pools = engine.engine.tables.pools
    paid = active = 0
    for index in range(9):
        engine.submit(f"r{index}", [7] * (4 + index), n=1 + index % 3, max_tokens=9, seed=index)
    while engine.engine.has_work:
        before = sum(pool.num_active * pool.page_bytes for pool in pools)
        output = engine.step()
        active += 7 * before  # the step moves pages at its own time; the clock moves 7 ns ahead of it
        paid += sum(row.usage.kv_byte_ns for row in output.rows if row.usage)
        assert output.stats.active_byte_ns == active
    assert paid == active > 0
    cached = sum(pool.num_cached * pool.page_bytes for pool in pools)
    before = sum(pool.ledger.cached_ns * pool.page_bytes for pool in pools)
    engine.engine.tables.advance(engine.now[0] + 5)
    assert sum(pool.ledger.cached_ns * pool.page_bytes for pool in pools) == before + 5 * cached > 0
