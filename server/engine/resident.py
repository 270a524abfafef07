"""Resident memory, read often and asked of the system seldom.

Knows nothing of pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable

from model.memory import rss_bytes

INTERVAL_NS = 100_000_000


class ResidentMemory:
    """The last measurement (of this process, if not told otherwise), renewed at most every interval_ns."""

    def __init__(self, measure: Callable[[], int] = rss_bytes, interval_ns: int = INTERVAL_NS) -> None:
        self._measure, self._interval_ns = measure, interval_ns
        self._bytes = 0
        self._read_ns: int | None = None

    def read(self, now_ns: int) -> int:
        """Bytes, at most interval_ns old."""
        if self._read_ns is None or now_ns - self._read_ns >= self._interval_ns:
            self._bytes, self._read_ns = self._measure(), now_ns
        return self._bytes
