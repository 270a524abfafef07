"""Which pages of every group a sequence holds: prefix hits, growth, forks, windows, and the bill for it.

Knows page numbers and tokens; decides nothing about who runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from model.kv_cost import KVLayout
from server.engine.messages import KvChange, KvEvent
from server.engine.pages import PagePool
from server.engine.plan import Copies
from server.engine.request import Sequence

UNBOUNDED = 1 << 40


class PageTables:
    """The pools of all groups, and the only code that moves pages between them and sequences."""

    def __init__(
        self, layout: KVLayout, num_pages: tuple[int, ...], max_chunk: int, prefix_caching: bool = True, now_ns: int = 0
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.prefix_caching = prefix_caching
        self.windows = [group.window for group in layout.groups]
        self.pools = [PagePool(count, layout.page_bytes(group), now_ns) for group, count in enumerate(num_pages)]
        self._max_chunk = max_chunk
        self._changes: list[KvChange] = []

    # ---- how much is needed -------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Tokens of the longest sequence that fits alone."""
        bounded = [
            pool.num_pages - 1
            for group, pool in enumerate(self.pools)
            if self.windows[group] is None or pool.num_pages - 1 < self._window_pages(group)
        ]
        return min(bounded) * self.page_size if bounded else UNBOUNDED

    def _window_pages(self, group: int) -> int:
        """Most pages a windowed group ever holds for one sequence."""
        return self.layout.groups[group].peak_pages(UNBOUNDED, self.page_size, self._max_chunk)

    def _missing_pages(self, group: int, num_tokens: int, start: int, live: int) -> int:
        """Pages to take for num_tokens by a sequence that has pages up to index `start`, `live` of them alive."""
        pages = self.layout.pages_for(num_tokens) - start
        window = self.windows[group]
        return max(0, pages if window is None else min(pages, self._window_pages(group) - live))

    def outstanding(self, running: list[Sequence]) -> list[int]:
        """Per group: pages that admitted prompts will still take before they decode."""
        totals = [0] * len(self.pools)
        for sequence in running:
            if sequence.num_computed < len(sequence.tokens):
                for group in range(len(totals)):
                    totals[group] += self._still_needed(sequence, group)
        return totals

    def _still_needed(self, sequence: Sequence, group: int) -> int:
        start = len(sequence.pages[group])
        return self._missing_pages(
            group, sequence.num_tokens + sequence.request.generates, start, start - sequence.first_live[group]
        )

    def _first_seen(self, group: int, position: int) -> int:
        """First page that a query at `position` can see."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    # ---- prefix cache -------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> int:
        """Leading full pages that every group still holds as far as it needs them; one token is always left over."""
        if not self.prefix_caching or sequence.scores_prompt or sequence.request.kind == "embed":
            return 0
        hits = (sequence.num_tokens - 1) // self.page_size
        sequence.extend_keys(self.page_size, hits)
        while hits:
            missing = self._last_missing(sequence, hits)
            if missing is None:
                return hits
            hits = missing
        return 0

    def _last_missing(self, sequence: Sequence, hits: int) -> int | None:
        """A page that rules out `hits` leading pages: the first gap of a full group, the last of a windowed one."""
        keys = sequence.keys
        for group, pool in enumerate(self.pools):
            if self.windows[group] is None:
                gaps = (page for page in range(hits) if keys[page] not in pool.page_of)
            else:
                first = self._first_seen(group, hits * self.page_size)
                gaps = (page for page in range(hits - 1, first - 1, -1) if keys[page] not in pool.page_of)
            missing = next(gaps, None)
            if missing is not None:
                return missing
        return None

    def register(self, sequence: Sequence, end: int) -> None:
        """Tokens before `end` are computed: their full pages may be found by others."""
        full = min(end, sequence.num_computed) // self.page_size
        if full <= sequence.num_registered or not self.prefix_caching:
            return
        sequence.extend_keys(self.page_size, full)
        for index in range(sequence.num_registered, full):
            for pool, pages in zip(self.pools, sequence.pages, strict=True):
                if pages[index]:
                    pool.register(pages[index], sequence.keys[index])
        sequence.num_registered = full

    def forget(self, sequence: Sequence) -> None:
        """Its KV is not to be trusted: nobody else finds these pages."""
        for pool, pages in zip(self.pools, sequence.pages, strict=False):
            for page in pages:
                pool.forget(page)

    # ---- taking and giving pages --------------------------------------------------------------------------

    def admit(self, sequence: Sequence, outstanding: list[int], spare: int) -> bool:
        """Take the longest cached prefix if the whole prompt (and `spare` pages) fits beside what is promised."""
        hits = self.match(sequence)
        found = [self._found(sequence, group, hits) for group in range(len(self.pools))]
        for group, pool in enumerate(self.pools):
            live = [page for page in found[group] if page]
            need = self._missing_pages(group, sequence.num_tokens + sequence.request.generates, hits, len(live)) + spare
            from_cache = sum(1 for page in live if pool.is_cached(page))
            if pool.available - from_cache - outstanding[group] < need:
                return False
        self._take(sequence, found)
        sequence.num_computed = hits * self.page_size
        sequence.num_registered = hits
        return True

    def _found(self, sequence: Sequence, group: int, hits: int) -> array[int]:
        pool = self.pools[group]
        first = self._first_seen(group, hits * self.page_size)
        return array("i", [0] * first + [pool.page_of[key] for key in sequence.keys[first:hits]])

    def _take(self, sequence: Sequence, tables: list[array[int]]) -> None:
        """Share every page of the tables."""
        sequence.pages = tables
        sequence.first_live = [next((i for i, page in enumerate(table) if page), len(table)) for table in tables]
        for group, table in enumerate(tables):
            for page in table[sequence.first_live[group] :]:
                self.pools[group].share(page)
                self._gain(sequence, group, page, "found")
        self._note_peak(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child holds all of the parent's pages; who first writes the partial tail gets a copy (reserve)."""
        self._take(child, [table[:] for table in parent.pages])
        child.num_computed = parent.num_computed
        child.num_registered = parent.num_computed // self.page_size
        child.keys = parent.keys[: child.num_registered]
        parent.shares_tail = child.shares_tail = parent.num_computed % self.page_size != 0
        parent.writable = child.writable = 0

    def reserve(self, sequence: Sequence, end: int, copies: Copies) -> bool:
        """Own a writable page for every token from num_computed to end - 1, or take none and return False.

        Pages that no later token sees go back in either case: they may be the room that is missing.
        """
        if end <= sequence.writable:
            return True
        growth = max(0, self.layout.pages_for(end) - len(sequence.pages[0]))
        self._drop_unseen(sequence)
        tails = [self._shared_tail(sequence, group) for group in range(len(self.pools))]
        for pool, tail in zip(self.pools, tails, strict=True):
            if pool.available < growth + (tail is not None):
                return False
        for group, pool in enumerate(self.pools):
            self._own_tail(sequence, group, tails[group], copies)
            for _ in range(growth):
                page = pool.allocate()
                sequence.pages[group].append(page)
                self._gain(sequence, group, page, "new")
        sequence.shares_tail = False
        sequence.writable = len(sequence.pages[0]) * self.page_size
        self._note_peak(sequence)
        return True

    def _shared_tail(self, sequence: Sequence, group: int) -> int | None:
        """Index of the page about to be written, if somebody else refers to it."""
        index = sequence.num_computed // self.page_size
        if not sequence.shares_tail or self.pools[group].references[sequence.pages[group][index]] == 1:
            return None
        return index

    def _own_tail(self, sequence: Sequence, group: int, tail: int | None, copies: Copies) -> None:
        if tail is not None:
            table, copy = sequence.pages[group], self.pools[group].allocate()
            copies[group].append((table[tail], copy))
            self._lose(sequence, group, table[tail])
            table[tail] = copy
            self._gain(sequence, group, copy, "new")

    def _drop_unseen(self, sequence: Sequence) -> None:
        """Give back pages that no later token can see."""
        for group in range(len(self.pools)):
            first_seen = self._first_seen(group, sequence.num_computed)
            table = sequence.pages[group]
            for index in range(sequence.first_live[group], first_seen):
                self._lose(sequence, group, table[index])
                table[index] = 0
            sequence.first_live[group] = max(sequence.first_live[group], first_seen)

    def release(self, sequence: Sequence) -> None:
        """Give everything back, tails first: the front of a prompt is what others are most likely to ask for."""
        for group, table in enumerate(sequence.pages):
            for index in range(len(table) - 1, sequence.first_live[group] - 1, -1):
                self._lose(sequence, group, table[index])
        sequence.pages, sequence.first_live = [], []
        sequence.num_computed = sequence.num_registered = sequence.writable = 0
        sequence.shares_tail = False

    def _gain(self, sequence: Sequence, group: int, page: int, event: KvEvent) -> None:
        pool = self.pools[group]
        sequence.byte_ns -= pool.page_bytes * pool.held(page)
        sequence.pages_held += 1
        sequence.bytes_held += pool.page_bytes
        self._changes.append((group, page, event, sequence.request.id, sequence.request.tenant))

    def _lose(self, sequence: Sequence, group: int, page: int) -> None:
        pool = self.pools[group]
        sequence.byte_ns += pool.page_bytes * pool.held(page)
        sequence.pages_held -= 1
        sequence.bytes_held -= pool.page_bytes
        pool.release(page)
        event: KvEvent = "kept" if pool.keeps(page) else "left"
        self._changes.append((group, page, event, sequence.request.id, sequence.request.tenant))

    def take_changes(self) -> tuple[KvChange, ...]:
        """Pages that changed hands since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def _note_peak(self, sequence: Sequence) -> None:
        sequence.peak_pages = max(sequence.peak_pages, sequence.pages_held)
        sequence.peak_bytes = max(sequence.peak_bytes, sequence.bytes_held)

    # ---- books --------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> None:
        """Bring every ledger to now_ns; pages change hands at that time until the next call."""
        for pool in self.pools:
            pool.advance(now_ns)

    def slots(self, running: list[Sequence]) -> tuple[int, int]:
        """(token slots that hold a token, token slots) of all active pages. Only tail pages have empty slots."""
        used = allocated = 0
        for group, pool in enumerate(self.pools):
            empty = {
                sequence.pages[group][-1]: len(sequence.pages[group]) * self.page_size - sequence.num_computed
                for sequence in running
                if sequence.pages[group]
            }
            slots = pool.num_active * self.page_size
            allocated += slots
            used += slots - sum(empty.values())
        return used, allocated

    def holders(self, running: list[Sequence], group: int) -> Iterator[int]:
        for sequence in running:
            yield from sequence.pages[group][sequence.first_live[group] :]

    def check_integrity(self, running: list[Sequence]) -> None:
        for group, pool in enumerate(self.pools):
            pool.check_integrity(self.holders(running, group))
