"""Time, the machine's limits and one line of a report, for the benchmark of the CPU operations.

Knows neither operations nor models: what is timed comes as callables.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from model.huge_pages import in_huge_pages
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


PROBES = {"float32": "rw_probe_floats", "bfloat16": "rw_probe_pairs", "int8": "rw_probe_quads"}
"""Kinds of factors, and what runs their dot products; 4-bit weights are multiplied as bytes."""
Work = dict[str, float]
"""Operations by the kind of their factors."""


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_second: float
    operations_per_second: dict[str, float]  # by kind

    def reading(self, num_bytes: float) -> float:
        """The least seconds in which so many bytes are read."""
        return num_bytes / self.bytes_per_second

    def computing(self, work: Work) -> float:
        """The least seconds in which so many operations are done."""
        return sum(operations / self.operations_per_second[kind] for kind, operations in work.items())


def measure_limits(clock: Clock, kinds: Iterable[str] = PROBES) -> Limits:
    """Read bandwidth over 256 MiB of huge pages and the rates of dot products; CPU time is counted per thread."""
    native = ctypes.CDLL(str(find_library()))
    data, rounds = in_huge_pages(256 << 20).fill_(1), ctypes.c_int64(1 << 20)
    threads = torch.get_num_threads() if clock.cpu_time else 1
    pointer, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.nbytes // 4)
    probes = {kind: getattr(native, PROBES[kind]) for kind in kinds}
    for probe in probes.values():
        probe.restype = ctypes.c_int64
    operations = {kind: probe(rounds) for kind, probe in probes.items()}
    times = clock.medians(
        {
            "read": lambda: native.rw_probe_read(pointer, count),
            **{kind: partial(probe, rounds) for kind, probe in probes.items()},
        }
    )
    rates = {kind: done * threads / times[kind] for kind, done in operations.items()}
    return Limits(data.nbytes * threads / times["read"], rates)


@dataclass(frozen=True, slots=True)
class Report:
    clock: Clock
    others: Others

    def line(self, what: str, num_bytes: float, work: Work, calls: Calls) -> None:
        """One comparison, beside the machine's limits at that moment: what takes longer, reading or computing."""
        limits = measure_limits(Clock(self.clock.cpu_time, self.clock.seconds / 4), work)
        threads = torch.get_num_threads() if self.clock.cpu_time else 1
        times = {name: seconds / threads for name, seconds in self.clock.medians(calls).items()}
        native, reading, computing = times["native"], limits.reading(num_bytes), limits.computing(work)
        text = f"{what:<28} {native * 1e3:9.3f} ms {max(reading, computing) / native:6.0%} of the limit:"
        text += f" {reading / native:5.0%} of read ({num_bytes / native / 1e9:.1f} of"
        text += f" {limits.bytes_per_second / 1e9:.1f} GB/s), {computing / native:4.0%} of arithmetic"
        text += f" ({sum(work.values()) / native / 1e9:.0f} of {sum(work.values()) / computing / 1e9:.0f} GFLOP/s)"
        if "reference" in times:
            text += f"   reference {times['reference'] * 1e3:9.3f} ms, {times['reference'] / native:5.1f} times"
        busy = self.others.share()
        disturbed = busy > QUIET and not self.clock.cpu_time
        print(text + (f"   (others used {busy:.0%} of the CPU)" if disturbed else ""), flush=True)
