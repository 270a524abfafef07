"""This machine during a run: the lag of this client's loop, and who used the CPU.

Knows nothing about requests; reads /proc where there is one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from server.loadtest.measure import Distribution

TICK = 0.01


class LoopLag:
    """How late this process wakes up: what adds to every time it takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.held = Distribution()
        self._clock = clock

    async def watch(self) -> None:
        while True:
            due = self._clock() + TICK
            await asyncio.sleep(TICK)
            self.held.add(max(0.0, self._clock() - due))


SHORTEST = 1.0
"""Seconds of the machine's CPU time: the system counts in ticks of 10 ms, a share of fewer than 100 says nothing."""


class CpuWatch:
    """CPU time of this process, of the server (where it listens on this machine), and of everything else. Linux."""

    def __init__(self, ports: list[int]) -> None:
        self._servers = set().union(*(server_pids(port) for port in ports)) if ports else set()
        self._before = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        own = sum(os.times()[:2])
        if not Path("/proc/stat").exists():
            return 0.0, own, 0.0, 0.0
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle = numbers[3] + numbers[4]
        ticks = os.sysconf("SC_CLK_TCK")
        servers = sum(process_ticks(pid) for pid in self._servers)
        return sum(numbers) / ticks, own, servers / ticks, (sum(numbers) - idle) / ticks

    def summary(self) -> dict[str, float | None]:
        """Shares of the machine's whole CPU time, 0 to 1; `client_core` is a share of one core."""
        whole, own, servers, busy = (now - then for now, then in zip(self._read(), self._before, strict=True))
        if whole < SHORTEST:
            return {"client": None, "servers": None, "others": None, "client_core": None}
        cores = os.cpu_count() or 1
        return {
            "client": own / whole,
            "servers": servers / whole,
            "others": max(0.0, busy - own - servers) / whole,
            "client_core": own / whole * cores,
        }


def process_ticks(pid: int) -> int:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(after_name[11]) + int(after_name[12])


def server_pids(port: int) -> set[int]:
    """The processes of this machine that listen on `port`, and their descendants; empty where that cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if sockets and any(str(fd.readlink()) in sockets for fd in (entry / "fd").iterdir()):
                found.add(int(entry.name))
        except OSError:
            continue
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


def listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes
