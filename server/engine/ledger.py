"""Time integrals of one page pool: who held how much memory for how long, in integer nanoseconds.

Knows page numbers and reference counts, not requests; the clock is read by the caller and handed in.

h of a page is the integral of dt / references over the time it was referenced. A holder pays h at release minus h at
acquire, so equal sharers pay equal parts. dt rarely divides evenly: the rest, below one nanosecond a reference, stays
in the page's open interval and is shared out with it. With one reference nothing is left over, and a page always
passes through one reference before it goes idle: what the holders paid is the page's active time, to the nanosecond.
"""

from __future__ import annotations


class Ledger:
    """h of every page, and the pool's own integrals (page-nanoseconds), kept by two ways that must agree."""

    def __init__(self, num_pages: int, now_ns: int) -> None:
        self.now_ns = now_ns
        self.active_ns = 0
        self.cached_ns = 0
        self._charged = [0] * num_pages
        self._open_since = [now_ns] * num_pages

    def advance(self, now_ns: int, active_pages: int, cached_pages: int) -> None:
        """Move to now_ns; the counts held since the last call."""
        elapsed = now_ns - self.now_ns
        self.active_ns += active_pages * elapsed
        self.cached_ns += cached_pages * elapsed
        self.now_ns = now_ns

    def settle(self, page: int, references: int) -> int:
        """h of the page now, after `references` holders since the last settlement. Call before the count changes."""
        if references:
            share, rest = divmod(self.now_ns - self._open_since[page], references)
            self._charged[page] += share
            self._open_since[page] = self.now_ns - rest
        else:
            self._open_since[page] = self.now_ns
        return self._charged[page]
