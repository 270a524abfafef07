"""Time, the machine's limits and one line of a report, for the benchmark of the CPU operations.

Knows neither operations nor models: what is timed comes as callables.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model.ops.cpu.build import find_library

QUIET = 0.05
"""Share of the CPU that other processes may use before a figure is marked as disturbed."""
Calls = dict[str, Callable[[], object]]
"""What is compared: native, and reference unless it is left out."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Wall time, or the CPU time of this process where a busy machine would spoil the wall's."""

    cpu_time: bool
    seconds: float  # to spend on each comparison

    def once(self, call: Callable[[], object]) -> float:
        read = time.process_time if self.cpu_time else time.perf_counter
        start = read()
        call()
        return read() - start

    def medians(self, calls: Calls) -> dict[str, float]:
        """Seconds of each call: the median over rounds in which they take turns."""
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: statistics.median(values) for name, values in times.items()}


class Others:
    """The share of the CPUs that other processes used since the last look."""

    def __init__(self) -> None:
        self._last = self._read()

    def share(self) -> float:
        before, self._last = self._last, self._read()
        whole, idle, own = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, (whole - idle - own) / whole) if whole else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own = os.times()
        return sum(ticks), ticks[3] + ticks[4], (own.user + own.system) * os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time in which so many bytes are read and so many operations done."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_limits(clock: Clock) -> Limits:
    """Read bandwidth over 256 MiB and the rate of fp32 multiply-adds; CPU time is counted per thread."""
    native = ctypes.CDLL(str(find_library()))
    native.rw_probe_madd.restype = ctypes.c_int64
    data, rounds = torch.ones(64 << 20), 1 << 21
    threads = torch.get_num_threads() if clock.cpu_time else 1
    pointer, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel())
    flops = native.rw_probe_madd(ctypes.c_int64(rounds))
    times = clock.medians(
        {
            "read": lambda: native.rw_probe_read(pointer, count),
            "madd": lambda: native.rw_probe_madd(ctypes.c_int64(rounds)),
        }
    )
    return Limits(data.nbytes * threads / times["read"], flops * threads / times["madd"])


@dataclass(frozen=True, slots=True)
class Report:
    clock: Clock
    others: Others

    def line(self, what: str, num_bytes: float, flops: float, calls: Calls) -> None:
        """One comparison, beside the machine's limits at that moment."""
        limits = measure_limits(Clock(self.clock.cpu_time, self.clock.seconds / 4))
        threads = torch.get_num_threads() if self.clock.cpu_time else 1
        times = {name: seconds / threads for name, seconds in self.clock.medians(calls).items()}
        native = times["native"]
        text = f"{what:<28} {native * 1e3:9.3f} ms {limits.seconds(num_bytes, flops) / native:6.0%} of the limit"
        text += f" {num_bytes / native / 1e9:7.1f} GB/s {flops / native / 1e9:7.1f} GFLOP/s"
        if "reference" in times:
            text += f"   reference {times['reference'] * 1e3:9.3f} ms, {times['reference'] / native:5.1f} times"
        busy = self.others.share()
        disturbed = busy > QUIET and not self.clock.cpu_time
        print(text + (f"   (others used {busy:.0%} of the CPU)" if disturbed else ""), flush=True)
