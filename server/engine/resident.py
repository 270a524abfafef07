"""Resident memory of this process, read often and asked of the kernel seldom.

Knows nothing of pages or requests.
"""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")
INTERVAL_NS = 100_000_000


def resident_bytes() -> int:
    """Bytes of RAM this process occupies now; 0 where the system does not tell."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """The last reading, renewed at most every 100 ms."""

    def __init__(self) -> None:
        self._bytes = 0
        self._read_ns: int | None = None

    def read(self, now_ns: int) -> int:
        if self._read_ns is None or now_ns - self._read_ns >= INTERVAL_NS:
            self._bytes, self._read_ns = resident_bytes(), now_ns
        return self._bytes
