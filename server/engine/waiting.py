"""The order in which waiting sequences are admitted: priority, then tenants in turn, then arrival.

Knows neither pages nor time. A tenant with one request waits for at most one of every other tenant's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from server.engine.request import Sequence

Lines = OrderedDict[str, deque[Sequence]]
"""One line a tenant; the first tenant is served next."""


class WaitingQueue:
    def __init__(self) -> None:
        self._by_priority: dict[int, Lines] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._by_priority):
            for line in self._by_priority[priority].values():
                yield from line

    def push(self, sequence: Sequence) -> None:
        """At the end of its tenant's line."""
        self._line(sequence).append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """Next of its priority: it ran before, or belongs to a request that runs."""
        self._line(sequence).appendleft(sequence)
        self._by_priority[sequence.request.priority].move_to_end(sequence.request.tenant, last=False)

    def _line(self, sequence: Sequence) -> deque[Sequence]:
        self._length += 1
        lines = self._by_priority.setdefault(sequence.request.priority, OrderedDict())
        return lines.setdefault(sequence.request.tenant, deque())

    def head(self) -> Sequence | None:
        """The sequence that is next; None when nobody waits."""
        if not self._by_priority:
            return None
        lines = self._by_priority[min(self._by_priority)]
        return next(iter(lines.values()))[0]

    def pop(self) -> Sequence:
        """Take the head; its tenant's turn passes on."""
        lines = self._by_priority[min(self._by_priority)]
        tenant, line = next(iter(lines.items()))
        sequence = line[0]
        lines.move_to_end(tenant)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        priority, tenant = sequence.request.priority, sequence.request.tenant
        lines = self._by_priority[priority]
        lines[tenant].remove(sequence)
        self._length -= 1
        if not lines[tenant]:
            del lines[tenant]
        if not lines:
            del self._by_priority[priority]
