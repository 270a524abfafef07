"""Resident memory of this process, read often and asked of the system seldom.

Knows nothing of pages or requests.
"""

from __future__ import annotations

from model.memory import rss_bytes

INTERVAL_NS = 100_000_000


class ResidentMemory:
    """The last reading, renewed at most every 100 ms."""

    def __init__(self) -> None:
        self._bytes = 0
        self._read_ns: int | None = None

    def read(self, now_ns: int) -> int:
        if self._read_ns is None or now_ns - self._read_ns >= INTERVAL_NS:
            self._bytes, self._read_ns = rss_bytes(), now_ns
        return self._bytes
