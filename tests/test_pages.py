"""The page pool: who may be found, who is reused first, and books that balance after every move."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from server.engine.messages import Submit
from server.engine.pages import PagePool, page_key, root_key


def key(number: int) -> bytes:
    return page_key(root_key(""), Submit.pack([number]))


def test_page_0_is_never_given_out() -> None:
    pool = PagePool(4, 1)
    assert sorted(pool.allocate() for _ in range(pool.available)) == [1, 2, 3]
    assert pool.available == 0


def test_states_add_up_to_the_pool_without_scratch() -> None:
    pool = PagePool(6, 1)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, key(1))
    pool.release(first)
    assert (pool.num_active, pool.num_cached, pool.num_free) == (1, 1, 3)
    pool.release(second)
    assert (pool.num_active, pool.num_cached, pool.num_free) == (0, 1, 4)


def test_free_pages_go_before_untouched_ones_and_cached_ones_last() -> None:
    pool = PagePool(5, 1)
    cached, free = pool.allocate(), pool.allocate()
    pool.register(cached, key(1))
    pool.release(cached)
    pool.release(free)
    assert [pool.allocate() for _ in range(4)] == [free, 3, 4, cached]
    assert pool.evictions == 1


def test_the_longest_idle_page_is_evicted_first_and_a_hit_renews_it() -> None:
    pool = PagePool(4, 1)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.register(page, key(page))
        pool.release(page)
    pool.share(pages[0])
    pool.release(pages[0])
    assert pool.cached_pages() == [pages[1], pages[2], pages[0]]
    assert pool.allocate() == pages[1]
    assert key(pages[1]) not in pool.page_of and key(pages[0]) in pool.page_of


def test_a_reused_page_is_not_found_under_its_old_key() -> None:
    """nano-vllm 163: a reused block kept its entry, and a later request was given other content."""
    pool = PagePool(2, 1)
    page = pool.allocate()
    pool.register(page, key(1))
    pool.release(page)
    assert pool.allocate() == page
    pool.register(page, key(2))
    assert pool.page_of == {key(2): page}


def test_equal_content_is_kept_once() -> None:
    pool = PagePool(4, 1)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, key(1))
    pool.register(second, key(1))
    pool.release(second)
    assert pool.page_of == {key(1): first}
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_a_forgotten_page_stays_with_its_holders_and_is_found_by_nobody() -> None:
    pool = PagePool(4, 1)
    page = pool.allocate()
    pool.register(page, key(1))
    pool.forget(page)
    assert key(1) not in pool.page_of
    pool.release(page)
    assert (pool.num_cached, pool.num_free) == (0, 3)


def test_releasing_what_nobody_holds_is_a_broken_invariant() -> None:
    pool = PagePool(4, 1)
    page = pool.allocate()
    pool.release(page)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release(page)


def test_keys_tell_parents_tokens_and_salts_apart() -> None:
    """vLLM 29163: lists that collide under Python's hash, and equal tokens behind different parents."""
    tokens = [[-1], [-2], [0], [2**31 - 1], [0, 0], [1, 2], [2, 1]]
    keys = {page_key(root_key(salt), Submit.pack(ids)) for ids in tokens for salt in ("", "a", "b", "tokens")}
    keys |= {page_key(parent, Submit.pack([1, 2])) for parent in list(keys)}
    assert len(keys) == 2 * len(tokens) * 4
    assert all(len(one) == 16 for one in keys)


class Pool(RuleBasedStateMachine):
    """Random traffic on a small pool, against a dictionary that remembers what each page holds."""

    held: Bundle[int] = Bundle("held")

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(7, 10)
        self.holders: list[int] = []
        self.content: dict[int, int] = {}  # page -> what its last writer put there
        self.now = self.next_content = 0

    @precondition(lambda self: self.pool.available > 0)
    @rule(target=held)
    def allocate(self) -> int:
        page = self.pool.allocate()
        assert page not in self.holders and page != 0
        self.holders.append(page)
        self.next_content += 1
        self.content[page] = self.next_content
        return page

    @rule(target=held, page=held)
    def share(self, page: int) -> int:
        self.pool.share(page)
        self.holders.append(page)
        return page

    @rule(page=consumes(held))
    def release(self, page: int) -> None:
        self.pool.release(page)
        self.holders.remove(page)

    @rule(page=held)
    def register(self, page: int) -> None:
        self.pool.register(page, key(self.content[page]))

    @rule(page=held)
    def forget(self, page: int) -> None:
        self.pool.forget(page)

    @precondition(lambda self: self.pool.page_of)
    @rule(target=held, which=st.integers(0, 100))
    def hit(self, which: int) -> int:
        found = list(self.pool.page_of.items())
        hit_key, page = found[which % len(found)]
        assert hit_key == key(self.content[page]), "a hit holds something else"
        self.pool.share(page)
        self.holders.append(page)
        return page

    @rule(elapsed=st.integers(0, 50))
    def wait(self, elapsed: int) -> None:
        self.now += elapsed
        self.pool.advance(self.now)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.holders)
            assert self.pool.num_active + self.pool.num_cached + self.pool.num_free == 6
            assert self.pool.num_active == len(set(self.holders))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
