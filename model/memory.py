"""Memory of this process and what the system still grants it: Linux files read as they are.

Knows neither torch nor models: addresses and bytes only. A fake tree stands in for / in the tests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from model.cgroup import folders, memberships

GIB = 1 << 30
DEFAULT_POOL_LIMIT = 4 * GIB
ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """Bytes that can still be taken: the least of MemAvailable and every cgroup above us, version 1 and 2.

    A cgroup grants its limit less what is used, where inactive file cache does not count as used.
    """
    return max(0, min([_mem_available(root), *_cgroup_headrooms(root)]))


def default_pool_bytes(available: int, full_batch_bytes: int) -> int:
    """Size of the KV pool nobody chose: a quarter of what is available, within 4 GiB and what can ever be used."""
    return min(available // 4, DEFAULT_POOL_LIMIT, full_batch_bytes)


def rss_bytes(root: Path = ROOT) -> int:
    """Resident bytes of this process."""
    fields = (root / "proc/self/statm").read_text().split()
    return int(fields[1]) * mmap.PAGESIZE


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of [address, address + nbytes) lies in memory, in whole system pages (mincore)."""
    if nbytes == 0:
        return 0
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + nbytes - start
    flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), flags):
        number = ctypes.get_errno()
        raise OSError(number, f"mincore: {os.strerror(number)}")
    return bytes(flags).count(1) * mmap.PAGESIZE


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root}/proc/meminfo has no MemAvailable line")


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    for controllers, path in memberships(root):
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _headrooms(root / mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _headrooms(root / "sys/fs/cgroup/memory", path, *files)


def _headrooms(mount: Path, path: str, limit: str, usage: str, inactive: str) -> Iterator[int]:
    """Headroom of every folder from the process's own cgroup up to the mount; folders we cannot see are passed over."""
    for folder in folders(mount, path):
        if not (folder / limit).exists() or (text := (folder / limit).read_text().strip()) == "max":
            continue
        used = int((folder / usage).read_text()) - _stat(folder / "memory.stat", inactive)
        yield int(text) - used


def _stat(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, value = line.split()
        if name == key:
            return int(value)
    return 0
