"""What a step costs beside the forward: python -m server.measure.phases [--sequences 256] [--context 512].

A runner that answers at once takes the model's place, so that only scheduling and bookkeeping are left. Milliseconds
are CPU time of this thread: other processes slow the clock on the wall, not these figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from model.kv_cost import KVGroup, KVLayout
from server.engine.core import Engine
from server.engine.facts import EngineInfo
from server.engine.messages import Ready, SamplingParams, Submit
from server.engine.page_tables import PageTables
from server.engine.plan import RowResult, SampledToken, StepPlan
from server.engine.runner import pack
from server.engine.sampler import sample_batch
from server.engine.scheduler import Limits, Scheduler
from server.engine.stream import HostStream
from server.engine.worker import Worker
from server.loadtest.options import positive
from server.measure.engine import Finding

VOCAB = 40_000
WORD = 1000
"""Any token that has a text."""
SCHEDULE_MS = 0.5
"""The most that planning a step of 256 sequences may take."""
LAYOUT = KVLayout(16, (KVGroup(tuple(range(30)), None, 3, 64, "bfloat16"),))


@dataclass
class Instant:
    """A step whose forward takes no time; the batch is packed as for a real one."""

    plan: StepPlan

    def collect(self) -> list[RowResult]:
        return [RowResult([SampledToken(WORD) for _ in row.samples]) for row in self.plan.rows]


class InstantRunner:
    overlaps = False

    def __init__(self) -> None:
        self.pack: Callable[..., Any] = pack
        self.sample_batch: Callable[..., Any] = sample_batch

    def launch(self, plan: StepPlan) -> Instant:
        packed = self.pack(plan.rows, 1, LAYOUT.page_size)
        if packed.samples:
            self.sample_batch(packed.samples, VOCAB, HostStream())
        return Instant(plan)


class AsleepRunner(InstantRunner):
    """A forward that takes its time and no CPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def launch(self, plan: StepPlan) -> Instant:
        time.sleep(self._seconds)
        return super().launch(plan)


def run_asleep(connection: Connection, step_seconds: float) -> None:
    """A whole engine process without a model: server.measure.token_cost puts HTTP in front of it."""
    engine = build(64, 1024, AsleepRunner(step_seconds))
    connection.send(Ready(engine.info))
    Worker(connection, engine).serve()


@dataclass
class Stopwatch:
    """CPU seconds of each call, by phase."""

    laps: dict[str, list[float]] = field(default_factory=dict)

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        laps = self.laps.setdefault(phase, [])

        def timed(*args: Any) -> Any:
            started = time.thread_time()
            result = function(*args)
            laps.append(time.thread_time() - started)
            return result

        return timed


def build(sequences: int, context: int, runner: InstantRunner | None = None) -> Engine:
    """An engine whose pool holds every sequence at twice the context."""
    pages = sequences * LAYOUT.pages_for(2 * context) + 1
    limits = Limits(2 * context, sequences, max(2048, sequences))
    tables = PageTables(LAYOUT, (pages,), limits.max_num_batched_tokens)
    info = EngineInfo(
        vocab_size=VOCAB, max_model_len=2 * context, device="none", dtype="none", kv_dtype="none", backend="none",
        threads=1, batch_invariant=True, page_size=LAYOUT.page_size, num_pages=(pages,), page_bytes=(1,),
        kv_bytes_predicted=0, kv_bytes_allocated=0, kv_bytes_resident=0, weights_bytes=0, workspace_bytes=0,
        rss_bytes=0, max_num_seqs=sequences, max_num_batched_tokens=2048, prefix_caching=True, pid=0,
    )  # fmt: skip
    return Engine(Scheduler(limits, tables), runner or InstantRunner(), info)


def measure(sequences: int, context: int, steps: int) -> dict[str, list[float]]:
    """Fill the engine, let every prompt finish, then time decode steps."""
    engine = build(sequences, context)
    for index in range(sequences):
        prompt = Submit.pack([(index * 31 + position) % VOCAB for position in range(context)])
        engine.add(Submit(str(index), prompt, SamplingParams(max_tokens=context)))
    while engine.scheduler.waiting or engine.step().stats.step_tokens != sequences:
        engine.step()
    watch = Stopwatch()
    runner: Any = engine._runner
    parts: list[tuple[str, Any, str]] = [
        ("schedule", engine.scheduler, "plan"),
        ("pack the batch", runner, "pack"),
        ("sampling inputs", runner, "sample_batch"),
        ("collect and report", engine, "_collect"),
        ("statistics", engine, "_stats"),
    ]
    for phase, owner, name in parts:
        setattr(owner, name, watch.around(phase, getattr(owner, name)))
    step = watch.around("whole step", engine.step)
    for _ in range(steps):
        step()
    return watch.laps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.measure.phases", description=__doc__)
    parser.add_argument("--sequences", type=positive, default=256)
    parser.add_argument("--context", type=positive, default=512)
    parser.add_argument("--steps", type=positive, default=300)
    args = parser.parse_args()
    laps = measure(args.sequences, args.context, args.steps)
    print(f"{args.sequences} sequences of {args.context} tokens, {args.steps} decode steps, ms of CPU a step")
    print(f"{'phase':<20}{'median':>9}{'p99':>9}")
    for phase, seconds in laps.items():
        ordered = sorted(seconds)
        print(f"{phase:<20}{median(ordered) * 1e3:>9.3f}{ordered[int(len(ordered) * 0.99)] * 1e3:>9.3f}")
    finding = Finding(
        "milliseconds to schedule a step", median(laps["schedule"]) * 1e3, SCHEDULE_MS, "CPU time, median"
    )
    print(finding.line())
    return 0 if finding.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
