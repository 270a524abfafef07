"""What the sections of a visit share: the device, its operations, a clock, and the limits that it reached itself.

Knows no models.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from statistics import median

import torch

from model.ops.interface import Ops
from model.ops.reference import ReferenceOps
from model.ops.select import ops_for
from server.engine.accelerator import Accelerator
from server.engine.cuda import cuda_accelerator
from server.engine.stream import StagedStream

ROUNDS = 5
"""Medians are of so many."""


class SystemMeter:
    """A CPU's memory is not measured."""

    def free(self) -> int:
        return 0

    def trim(self) -> None:
        return


@dataclass(frozen=True)
class Visit:
    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, tiny: bool) -> Visit:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # others work beside it
        return cls(torch.device(device), tiny)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def ops(self, batch_invariant: bool = False) -> Ops:
        """A GPU's own; on a CPU the reference, under TRITON_INTERPRET=1 the GPU's in Triton's interpreter."""
        if self.on_gpu:
            return ops_for(self.device, batch_invariant)
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreted: Ops = import_module("model.ops.triton.ops").TritonOps(batch_invariant)
            return interpreted
        return ReferenceOps()

    def accelerator(self) -> Accelerator:
        if self.on_gpu:
            return cuda_accelerator(self.device, can_record=self.ops().name != "reference")
        return Accelerator(StagedStream(self.device), SystemMeter(), lambda work: work)

    def clean_up(self) -> None:
        """What a section made is gone: recordings hold on to themselves until the collector comes."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    # ---- clock --------------------------------------------------------------------------------------------

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of one `work`, of which `times` run in a row so that the device never waits; the median of ROUNDS."""
        rounds = 1 if self.tiny else ROUNDS
        for _ in range(2):
            work()
        return median(self._run(work, times) for _ in range(rounds)) / times

    def _run(self, work: Callable[[], object], times: int) -> float:
        self.wait()
        started = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return time.perf_counter() - started

    # ---- limits -------------------------------------------------------------------------------------------

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a kernel that only reads: a sum or a maximum over a buffer much larger than any cache."""
        count = (1 << 14) if self.tiny else (1 << 31)
        buffer = torch.randn(count // 4, device=self.device)
        best = min(self.seconds(lambda: buffer.sum(), 4), self.seconds(lambda: buffer.amax(), 4))
        return count / best

    @cached_property
    def matrix_rate(self) -> float:
        """Floating-point operations a second of an 8192 x 8192 x 8192 product of random bf16."""
        size = 32 if self.tiny else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: a @ b, 8)
