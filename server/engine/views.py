"""Answers to Query: what the cache holds now, by pool, by request and by page, as plain dicts.

Reads the engine's state between two steps; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from server.engine.facts import EngineInfo
from server.engine.page_tables import PageTables
from server.engine.pages import PagePool
from server.engine.request import Sequence
from server.engine.scheduler import Scheduler

View = dict[str, Any]


class Books(Protocol):
    """What a view reads; the ledgers stand at now."""

    scheduler: Scheduler
    info: EngineInfo

    def kv_resident_bytes(self) -> int: ...
    def rss_bytes(self) -> int: ...


@dataclass(slots=True)
class Holding:
    """What one sequence holds. A shared page costs each of its holders an equal part: the parts add up to the page."""

    byte_ns: int
    own_pages: int = 0
    own_bytes: int = 0
    shared_pages: int = 0
    shared_bytes: int = 0
    share_weighted_bytes: int = 0

    def add(self, pool: PagePool, page: int, earlier_holders: int) -> None:
        """What does not divide evenly goes to the first holders, a byte each."""
        references = pool.references[page]
        if references == 1:
            self.own_pages += 1
            self.own_bytes += pool.page_bytes
        else:
            self.shared_pages += 1
            self.shared_bytes += pool.page_bytes
        part, rest = divmod(pool.page_bytes, references)
        self.share_weighted_bytes += part + (earlier_holders < rest)
        self.byte_ns += pool.page_bytes * pool.held(page)


def holdings(tables: PageTables, running: list[Sequence]) -> Iterator[tuple[Sequence, Holding]]:
    seen: list[Counter[int]] = [Counter() for _ in tables.pools]
    for sequence in running:
        holding = Holding(sequence.byte_ns)
        for group, pool in enumerate(tables.pools):
            for page in sequence.pages[group][sequence.first_live[group] :]:
                holding.add(pool, page, seen[group][page])
                seen[group][page] += 1
        yield sequence, holding


def kv_summary(engine: Books) -> View:
    """Pages and bytes by state, one entry a group, and what the system says about them."""
    scheduler, tables = engine.scheduler, engine.scheduler.tables
    used, allocated = tables.slots(scheduler.running)
    return {
        "page_size": tables.page_size,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "slots_used": used,
        "slots_allocated": allocated,
        "full_length_sequences": _full_length_sequences(scheduler),
        "prefix_queries": scheduler.prefix_queries,
        "prefix_hits": scheduler.prefix_hits,
        "preemptions": scheduler.num_preemptions,
        "kv_resident_bytes": engine.kv_resident_bytes(),
        "rss_bytes": engine.rss_bytes(),
        "groups": [_group(tables, index) for index in range(len(tables.pools))],
    }


def _full_length_sequences(scheduler: Scheduler) -> int:
    """Sequences of max_model_len tokens that the pool holds at once, sharing nothing."""
    limits, tables = scheduler.limits, scheduler.tables
    peaks = tables.layout.peak_pages(limits.max_model_len, limits.max_num_batched_tokens)
    return min((pool.num_pages - 1) // peak for pool, peak in zip(tables.pools, peaks, strict=True))


def _group(tables: PageTables, index: int) -> View:
    pool = tables.pools[index]
    return {
        "window": tables.windows[index],
        "layers": len(tables.layout.groups[index].layers),
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


def kv_requests(engine: Books) -> View:
    """Every sequence that runs or waits, with what it holds; share_weighted_bytes add up to active_bytes."""
    scheduler = engine.scheduler
    now_ns = scheduler.tables.pools[0].ledger.now_ns
    running = [
        _request(sequence, "running", holding, now_ns)
        for sequence, holding in holdings(scheduler.tables, scheduler.running)
    ]
    waiting = [_request(sequence, "waiting", Holding(sequence.byte_ns), now_ns) for sequence in scheduler.waiting]
    pools = scheduler.tables.pools
    return {"active_bytes": sum(pool.page_bytes * pool.num_active for pool in pools), "requests": running + waiting}


def _request(sequence: Sequence, state: str, holding: Holding, now_ns: int) -> View:
    request = sequence.request
    return {
        "id": request.id,
        "choice": sequence.choice,
        "state": state,
        "tenant": request.tenant,
        "priority": request.priority,
        "age_s": (now_ns - request.arrived_ns) / 1e9,
        "prompt_tokens": request.prompt_len,
        "output_tokens": sequence.num_output,
        "computed_tokens": sequence.num_computed,
        "cached_tokens": request.num_cached or 0,
        "preemptions": sequence.preemptions,
        "pages": [table.tolist() for table in sequence.pages],
        "bytes": sequence.bytes_held,
        "peak_bytes": sequence.peak_bytes,
        "own_pages": holding.own_pages,
        "own_bytes": holding.own_bytes,
        "shared_pages": holding.shared_pages,
        "shared_bytes": holding.shared_bytes,
        "share_weighted_bytes": holding.share_weighted_bytes,
        "byte_ns": holding.byte_ns,
    }


def kv_pages(engine: Books) -> View:
    """References of every page, one list a group (index = page; page 0 is scratch), and which idle ones are cached."""
    return {
        "groups": [
            {"references": list(pool.references), "cached": pool.cached_pages(), "touched": pool.touched}
            for pool in engine.scheduler.tables.pools
        ]
    }


VIEWS: dict[str, Callable[[Books], View]] = {
    "kv_summary": kv_summary,
    "kv_requests": kv_requests,
    "kv_pages": kv_pages,
}
