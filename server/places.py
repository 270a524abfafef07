"""Places for sequences that run or wait: who still gets one while the queue is full, and when to come back.

Knows tenants by name and sequences by number: no engine, no pipe, no requests.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

KEPT = 64
"""Ends of work that the rate is taken from."""
LONGEST = 60
"""Seconds after which asking again costs nobody anything."""


class QueueFullError(Exception):
    """No room for this request now. retry_after: seconds until there should be, from the measured rate."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(f"the queue is full ({text}); try again in {retry_after} s")
        self.retry_after = retry_after


class TooManyError(Exception):
    """One request has more sequences than there are places at all: no time will come at which it fits."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(f"{count} sequences (prompts times n) in one request, of at most {limit}: send fewer at once")


class Places:
    """How many sequences of each tenant are in, and how fast they get done.

    A tenant's share is all places by the number of tenants that have any. Within it a tenant gets in even when others
    have taken everything, so that L places hold at most L (1 + 1/2 + 1/3 + ...) sequences, whoever comes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_tenant: dict[str, int] = {}
        self._busy_before = self._busy_since = 0.0
        self._ends = deque([(0.0, 0)], maxlen=1 + KEPT)

    @property
    def taken(self) -> int:
        return sum(self._of_tenant.values())

    def enter(self, tenant: str, count: int, limit: int) -> None:
        """`count` sequences at once, or QueueFullError, or TooManyError. limit: places that there are."""
        if count > limit:
            raise TooManyError(count, limit)
        own, over = self._of_tenant.get(tenant, 0) + count, self.taken + count - limit
        share = limit // len(self._of_tenant.keys() | {tenant})
        if over > 0 and own > share:
            text = f"{self.taken} sequences run or wait, of at most {limit}, {own - count} of them yours"
            raise QueueFullError(f"{text}; {count} more were sent", self._seconds_until(over))
        if not self._of_tenant:
            self._busy_since = self._clock()
        self._of_tenant[tenant] = own

    def leave(self, tenant: str, count: int, is_done: bool) -> None:
        """is_done: they have had their turn. Who left by itself does not tell how long work takes."""
        if is_done:
            self._ends.append((self._busy_seconds(), count))
        self._of_tenant[tenant] -= count
        if not self._of_tenant[tenant]:
            busy = self._busy_seconds()
            del self._of_tenant[tenant]
            self._busy_before = busy

    def _busy_seconds(self) -> float:
        """Time in which there was work: hours without any say nothing of how long it takes."""
        return self._busy_before + (self._clock() - self._busy_since if self._of_tenant else 0.0)

    def _seconds_until(self, count: int) -> int:
        """Whole seconds, 1 to LONGEST, in which `count` more should be done; where none is so far, the first soon."""
        (begun, _), *ends = self._ends
        done = sum(sequences for _, sequences in ends)
        return min(LONGEST, max(1, math.ceil(count * (self._busy_seconds() - begun) / max(1, done))))
