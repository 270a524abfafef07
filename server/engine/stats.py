"""The numbers of a step: counters since the start, and gauges read off the pools.

Reads the scheduler between two steps; decides nothing and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.facts import EngineStats
from server.engine.plan import StepPlan
from server.engine.scheduler import Scheduler


@dataclass(slots=True)
class Counters:
    """What only core sees happen."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    nan_rows: int = 0


def engine_stats(
    counters: Counters, scheduler: Scheduler, plan: StepPlan, started_ns: int, now_ns: int, rss_bytes: int
) -> EngineStats:
    """Everything after a step that began at started_ns; the ledgers stand at now_ns."""
    pools = scheduler.tables.pools
    used, allocated = scheduler.tables.slots(scheduler.running)
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pages_active=sum(pool.num_active for pool in pools),
        pages_cached=sum(pool.num_cached for pool in pools),
        pages_free=sum(pool.num_free for pool in pools),
        slots_used=used,
        slots_allocated=allocated,
        shared_bytes_saved=sum(pool.extra_references * pool.page_bytes for pool in pools),
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.num_preemptions,
        evictions=sum(pool.evictions for pool in pools),
        nan_rows=counters.nan_rows,
        active_byte_ns=sum(pool.page_bytes * pool.ledger.active_ns for pool in pools),
        cached_byte_ns=sum(pool.page_bytes * pool.ledger.cached_ns for pool in pools),
        step_tokens=plan.num_tokens,
        step_seconds=(now_ns - started_ns) / 1e9,
        rss_bytes=rss_bytes,
        written_kv_bytes=sum(pool.touched * pool.page_bytes for pool in pools),
        active_bytes=sum(pool.page_bytes * pool.num_active for pool in pools),
        cached_bytes=sum(pool.page_bytes * pool.num_cached for pool in pools),
        now_ns=now_ns,
    )
