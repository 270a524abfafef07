"""How many cores this process may use: its affinity and the CPU quota of its cgroups.

Knows nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Whole cores, at least one: a quota of 1.5 cores counts as 2."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Limits of every cgroup from our own up to the mount (version 2)."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        mount = root / "sys/fs/cgroup"
        own = mount / path.lstrip("/")
        for folder in [own, *own.parents][: len(Path(path.lstrip("/")).parts) + 1]:
            limit = folder / "cpu.max"
            if limit.exists() and (quota := limit.read_text().split())[0] != "max":
                yield -(-int(quota[0]) // int(quota[1]))
