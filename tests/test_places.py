"""Places while the queue is full: shares of tenants, and how long to wait. Time is the test's."""

from __future__ import annotations

import pytest

from server.places import Places, QueueFullError, TooManyError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """LIMIT places, and a clock that moves when told."""

    LIMIT = 8

    def __init__(self) -> None:
        self.clock = Clock()
        self.places = Places(self.clock)

    def enter(self, tenant: str, count: int = 1) -> bool:
        try:
            self.places.enter(tenant, count, self.LIMIT)
        except QueueFullError:
            return False
        return True

    def work(self, seconds: float, count: int = 1, is_done: bool = True) -> None:
        """One request of `count` sequences, alone."""
        self.places.enter("a", count, self.LIMIT)
        self.clock.now += seconds
        self.places.leave("a", count, is_done)

    def retry_after(self, count: int) -> int:
        """What somebody is told who is `count` places too many."""
        self.places.enter("a", self.LIMIT - self.places.taken, self.LIMIT)
        with pytest.raises(QueueFullError) as full:
            self.places.enter("a", count, self.LIMIT)
        return full.value.retry_after


def test_hours_without_work_do_not_slow_the_rate() -> None:
    scene = Scene()
    scene.work(2)
    scene.clock.now += 3600
    scene.work(2)
    scene.clock.now += 3600
    assert scene.retry_after(3) == 6


def test_sequences_are_counted_not_requests() -> None:
    scene = Scene()
    for _ in range(3):
        scene.work(8, count=4)
    assert scene.retry_after(5) == 10


def test_who_hangs_up_at_once_does_not_speed_the_rate() -> None:
    scene = Scene()
    for _ in range(4):
        scene.work(5)
        scene.work(0, is_done=False)
    assert scene.retry_after(2) == 10


def test_only_the_latest_work_counts() -> None:
    scene = Scene()
    scene.work(1000)
    for _ in range(64):
        scene.work(1)
    assert scene.retry_after(4) == 4


def test_the_time_is_bounded_and_grows_while_nothing_gets_done() -> None:
    scene = Scene()
    assert scene.retry_after(1) == 1
    scene.clock.now += 7
    assert scene.retry_after(2) == 14
    scene.clock.now += 1000
    assert scene.retry_after(8) == 60


def test_a_tenant_below_its_share_gets_in_and_the_one_that_took_all_does_not() -> None:
    scene = Scene()
    assert scene.enter("many", 8) and not scene.enter("many")
    assert scene.enter("one") and scene.enter("one", 3) and not scene.enter("one")
    assert scene.enter("third", 2) and not scene.enter("third")
    assert not scene.enter("many")


def test_alone_a_tenant_may_have_everything() -> None:
    scene = Scene()
    assert scene.enter("a") and scene.enter("b")
    scene.places.leave("b", 1, True)
    assert scene.enter("a", 7)
    assert not scene.enter("a")


def test_places_are_bounded_however_many_tenants_come() -> None:
    scene = Scene()
    for tenant in range(1000):
        while scene.enter(str(tenant)):
            pass
    assert scene.places.taken <= 8 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6 + 1 / 7 + 1 / 8)


def test_what_never_fits_is_told_so_and_not_to_come_back() -> None:
    scene = Scene()
    with pytest.raises(TooManyError, match=r"9 sequences .* at most 8"):
        scene.enter("a", 9)
    assert scene.places.taken == 0 and scene.enter("a", 8)
