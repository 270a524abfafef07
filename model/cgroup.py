"""Which cgroups hold this process, and the folders that carry their limits.

Knows no limit: memory.py and server/engine/cores.py read those. A fake tree stands in for / in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Controllers ("" in version 2) and path of every cgroup we are in; none where the system has no cgroups."""
    file = root / "proc/self/cgroup"
    if file.exists():
        for line in file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            yield controllers, path


def folders(mount: Path, path: str) -> list[Path]:
    """From the cgroup `path` up to the mount; a container may not see all of them."""
    inside = Path(path.lstrip("/"))
    return [mount / inside, *(mount / above for above in inside.parents)]
