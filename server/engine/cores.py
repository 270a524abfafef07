"""How many cores this process may use: its affinity and the CPU quota of its cgroups.

Knows neither threads nor engines; version 1 quotas are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from model.cgroup import folders, memberships


def usable_cores(root: Path = Path("/")) -> int:
    """Whole cores, at least one: a quota of 1.5 cores counts as 2.

    To be asked where torch is not loaded: under OMP_PROC_BIND, OpenMP ties the thread that loads it to one core.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Limits of every cgroup from our own up to the mount (version 2)."""
    for controllers, path in memberships(root):
        if controllers == "":
            for folder in folders(root / "sys/fs/cgroup", path):
                limit = folder / "cpu.max"
                if limit.exists() and (quota := limit.read_text().split())[0] != "max":
                    yield -(-int(quota[0]) // int(quota[1]))
