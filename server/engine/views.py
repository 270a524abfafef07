"""Answers to Query: what the cache holds now, by pool, by request and by page, as plain dicts.

Reads the scheduler's state between two steps; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.engine.request import Sequence
from server.engine.scheduler import Scheduler

View = dict[str, Any]


def kv_summary(scheduler: Scheduler) -> View:
    """Pages and bytes by state, one entry a group."""
    tables = scheduler.tables
    used, allocated = tables.slots(scheduler.running)
    groups = [
        {
            "window": window,
            "page_bytes": pool.page_bytes,
            "pages": pool.num_pages - 1,
            "active": pool.num_active,
            "cached": pool.num_cached,
            "free": pool.num_free,
            "evictions": pool.evictions,
            "shared_bytes_saved": pool.extra_references * pool.page_bytes,
            "active_byte_ns": pool.page_bytes * pool.ledger.active_ns,
            "cached_byte_ns": pool.page_bytes * pool.ledger.cached_ns,
        }
        for pool, window in zip(tables.pools, tables.windows, strict=True)
    ]
    return {"page_size": tables.page_size, "slots_used": used, "slots_allocated": allocated, "groups": groups}


def kv_requests(scheduler: Scheduler) -> View:
    """Every sequence that runs or waits, with what it holds."""
    running = [_request(sequence, "running") for sequence in scheduler.running]
    waiting = [_request(sequence, "waiting") for sequence in scheduler.waiting]
    return {"requests": running + waiting}


def _request(sequence: Sequence, state: str) -> View:
    request = sequence.request
    return {
        "id": request.id,
        "choice": sequence.choice,
        "state": state,
        "tenant": request.tenant,
        "priority": request.priority,
        "prompt_tokens": request.prompt_len,
        "output_tokens": sequence.num_output,
        "computed_tokens": sequence.num_computed,
        "cached_tokens": request.num_cached or 0,
        "preemptions": sequence.preemptions,
        "pages": [table.tolist() for table in sequence.pages],
        "bytes": sequence.bytes_held,
    }


def kv_pages(scheduler: Scheduler) -> View:
    """References of every page, one list a group (index = page; page 0 is scratch), and which idle ones are cached."""
    return {
        "groups": [
            {"references": list(pool.references), "cached": pool.cached_pages(), "touched": pool.touched}
            for pool in scheduler.tables.pools
        ]
    }


VIEWS: dict[str, Callable[[Scheduler], View]] = {
    "kv_summary": kv_summary,
    "kv_requests": kv_requests,
    "kv_pages": kv_pages,
}
