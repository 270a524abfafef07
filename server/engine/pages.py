"""One pool of pages: reference counts, the prefix cache's keys, and the order in which pages are reused.

Knows page numbers and keys, neither requests nor tensors. Page 0 is scratch and never given out.

A page is free (no content worth keeping), active (referenced) or cached (keyed, unreferenced, evictable). Only a full
page whose KV is computed gets a key. Free pages go first, then pages never touched, then the longest idle cached one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from model.kv_cost import SCRATCH_PAGES
from server.engine.ledger import Ledger

Key = bytes
KEY_BYTES = 16
TOKENS = b"tokens\0"
"""Kind tag of pages that hold the KV of token ids (and of nothing else, such as images)."""


def root_key(salt: str) -> Key:
    """Parent of the first page's key. Equal prompts under different salts share nothing."""
    return blake2b(TOKENS + salt.encode(), digest_size=KEY_BYTES).digest()


def page_key(parent: Key, tokens: bytes) -> Key:
    """Key of a full page: 128 bits over everything before it (parent) and its own ids (int32 bytes)."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


class PagePool:
    """Pages of one group. `available` pages can be had at once, cached ones included."""

    def __init__(self, num_pages: int, page_bytes: int, now_ns: int = 0) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.ledger = Ledger(num_pages, now_ns)
        self.references = [0] * num_pages
        self.extra_references = 0  # sum of references - 1 over active pages: what sharing saves
        self.evictions = 0
        self.touched = SCRATCH_PAGES  # pages from here on were never written
        self._keys: list[Key | None] = [None] * num_pages
        self.page_of: dict[Key, int] = {}  # the pages a prefix can hit
        self._free: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free) + self.num_pages - self.touched

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, kept for the next same prefix."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be given out now: free ones, and cached ones by eviction."""
        return self.num_free + len(self._cached)

    @property
    def num_active(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_pages - SCRATCH_PAGES - self.available

    def advance(self, now_ns: int) -> None:
        """Bring the ledger to now_ns."""
        self.ledger.advance(now_ns, self.num_active, self.num_cached)

    def allocate(self) -> int:
        """A page with one reference and no key. The caller has checked `available`."""
        if self._free:
            page = self._free.pop()
        elif self.touched < self.num_pages:
            page = self.touched
            self.touched += 1
        else:
            page, _ = self._cached.popitem(last=False)
            self.forget(page)
            self.evictions += 1
        self.ledger.settle(page, 0)
        self.references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference to an active or cached page."""
        references = self.references[page]
        self.ledger.settle(page, references)
        if references:
            self.extra_references += 1
        else:
            del self._cached[page]
        self.references[page] = references + 1

    def release(self, page: int) -> None:
        """One reference less; the last one leaves a keyed page in the cache and frees any other."""
        references = self.references[page]
        assert references > 0, f"page {page} is released but nobody holds it"
        self.ledger.settle(page, references)
        self.references[page] = references - 1
        if references > 1:
            self.extra_references -= 1
        elif self._keys[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    def held(self, page: int) -> int:
        """h of the page as of the ledger's now (nanoseconds of one reference)."""
        return self.ledger.settle(page, self.references[page])

    def cached_pages(self) -> list[int]:
        """Longest idle first: the order of eviction."""
        return list(self._cached)

    def keeps(self, page: int) -> bool:
        """Nobody holds it and its content can still be found."""
        return page in self._cached

    def is_cached(self, page: int) -> bool:
        """Nobody holds this page."""
        return self.references[page] == 0

    def register(self, page: int, key: Key) -> None:
        """Make a full, computed page findable. Equal content that is already findable stays the one."""
        if self._keys[page] is None and key not in self.page_of:
            self._keys[page] = key
            self.page_of[key] = page

    def forget(self, page: int) -> None:
        """No later request finds this page."""
        key = self._keys[page]
        if key is not None:
            del self.page_of[key]
            self._keys[page] = None

    def check_integrity(self, holders: Iterable[int]) -> None:
        """Compare the books with the pages that sequences really hold (one entry a reference)."""
        held = Counter(holders)
        for page, references in enumerate(self.references):
            assert references == held[page], f"page {page}: {references} references, {held[page]} holders"
        assert self.references[0] == 0, "the scratch page was given out"
        idle = self._free + list(self._cached) + list(range(self.touched, self.num_pages))
        expected = [page for page in range(SCRATCH_PAGES, self.num_pages) if not self.references[page]]
        assert sorted(idle) == expected, "free and cached pages are not exactly the unreferenced ones"
        assert self.extra_references == sum(count - 1 for count in held.values()), "shared pages are miscounted"
        assert self.page_of == {key: page for page, key in enumerate(self._keys) if key}, "the key table is stale"
        assert all(self._keys[page] for page in self._cached), "a cached page has no key"
        assert not any(self._keys[page] for page in self._free), "a free page can be found"
