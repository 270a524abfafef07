"""Where a decoding step's time goes: each native function, and what lies between the calls.

Knows no limits of the machine: shares of the step, not of what is possible.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.batch import SampleBatch
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.ops.cpu.bench_scene import Model, Scene, Shape
from model.ops.cpu.native import CpuOps

REST = "Python and torch between them"


class _TimedLibrary:
    """The library, with the time spent in each function; ctypes' own conversion of arguments is inside."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.library, name)

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] += time.perf_counter() - start
            self.calls[name] += 1
            return result

        setattr(self, name, timed)
        return timed

    def take(self) -> dict[str, float]:
        """The seconds since the last look."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


class TimedOps(CpuOps):
    """The native operations, timed."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.timed = _TimedLibrary(self._native)
        self._native = self.timed  # type: ignore[assignment]

    def layers_runner(self, decoder: Decoder, kv: KVCache) -> None:
        """None: operation by operation, so that each is timed."""


def bench_parts(shape: Shape, ops: TimedOps, dtype: torch.dtype, quantization: str | None, seconds: float) -> None:
    """One token for each of 1 and 8 sequences of 256, the forward and a greedy choice."""
    model = Model.of(ops, shape, dtype, quantization)
    for sequences in (1, 8):
        scene, choice = Scene.of(shape, sequences, 256, 1, dtype), greedy(sequences)

        def step(scene: Scene = scene, choice: SampleBatch = choice) -> None:
            ops.sample(model.decoder.forward(scene.batch, scene.cache), choice)

        print(f"step, {sequences} x 1 of 256")
        for line in lines_of(*medians_of(step, ops.timed, seconds)):
            print(line, flush=True)


def greedy(rows: int) -> SampleBatch:
    """The settings of rows that take the best token."""
    zeros, none = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    return SampleBatch(zeros, none.int(), zeros + 1, zeros, none, none, none, num_logprobs=-1)


def medians_of(
    step: Callable[[], None], library: _TimedLibrary, seconds: float
) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds of every part of a step, and its calls."""
    step()
    library.take()
    library.calls.clear()
    steps: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps) < 5:
        start = time.perf_counter()
        step()
        whole, parts = time.perf_counter() - start, library.take()
        steps.append({**parts, REST: whole - sum(parts.values())})
    calls = {name: count // len(steps) for name, count in library.calls.items()}
    return {name: statistics.median(parts[name] for parts in steps) for name in steps[0]}, calls


def lines_of(parts: dict[str, float], calls: dict[str, int]) -> list[str]:
    """A line a part, the largest first."""
    whole = sum(parts.values())
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return [
        f"  {name.removeprefix('rw_'):<32} {calls.get(name, 0):4} calls {seconds * 1e3:8.3f} ms {seconds / whole:5.1%}"
        for name, seconds in ranked
    ]
