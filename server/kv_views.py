"""What /kv/summary and /kv/requests say: the engine's books in bytes and seconds, for the eyes of one caller.

Knows neither HTTP nor the engine: plain dicts in, plain dicts out.
"""

from __future__ import annotations

from typing import Any

from server.caller import Caller
from server.engine.facts import EngineInfo, EngineStats

View = dict[str, Any]
COLUMNS = (
    "prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens", "preemptions", "pages", "bytes", "peak_bytes",
    "own_pages", "own_bytes", "shared_pages", "shared_bytes", "share_weighted_bytes", "byte_seconds",
)  # fmt: skip
"""Columns of /kv/requests that are sums: over the rows and others they give the totals."""


def seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def summary(books: View, info: EngineInfo) -> View:
    """/kv/summary, made of the engine's kv_summary."""
    groups = books["groups"]
    pages = {"total": total(groups, "pages")} | {state: total(groups, state) for state in ("active", "cached", "free")}
    return {
        "page_size": books["page_size"],
        "bytes_per_token": info.token_bytes,
        "capacity_tokens": info.capacity_tokens,
        "max_model_len": info.max_model_len,
        "full_length_requests": books["full_length_sequences"],
        "requests": {"running": books["running"], "waiting": books["waiting"]},
        "pages": pages,
        "usage": share(pages["active"], pages["total"]),
        "slots": {"used": books["slots_used"], "allocated": books["slots_allocated"]},
        "bytes": pool_bytes(books, info),
        "process": process_bytes(books, info),
        "shared_bytes_saved": total(groups, "shared_bytes_saved"),
        "byte_seconds": {state: seconds(total(groups, f"{state}_byte_ns")) for state in ("active", "cached")},
        "evictions": total(groups, "evictions"),
        "preemptions": books["preemptions"],
        "prefix_cache": {
            "queries": books["prefix_queries"],
            "hits": books["prefix_hits"],
            "hit_rate": share(books["prefix_hits"], books["prefix_queries"]),
        },
        "groups": [group_view(group) for group in groups],
    }


def total(groups: list[View], name: str) -> int:
    return sum(group[name] for group in groups)


def group_view(group: View) -> View:
    shown = {name: value for name, value in group.items() if not name.endswith("_byte_ns")}
    return shown | {"byte_seconds": {state: seconds(group[f"{state}_byte_ns"]) for state in ("active", "cached")}}


def pool_bytes(books: View, info: EngineInfo) -> View:
    """active + cached + free + scratch = allocated, to the byte. differences: gaps to what is measured, and why."""
    states = {
        state: sum(group["page_bytes"] * group[state] for group in books["groups"])
        for state in ("active", "cached", "free")
    }
    resident = books["kv_resident_bytes"]
    return {
        "predicted": info.kv_bytes_predicted,
        "allocated": info.kv_bytes_allocated,
        "resident": resident,
        **states,
        "scratch": sum(info.page_bytes),
        "differences": [
            difference("allocated - predicted", info.kv_bytes_allocated - info.kv_bytes_predicted, SAME_CODE),
            difference("allocated - resident", info.kv_bytes_allocated - resident, NOT_TOUCHED),
        ],
    }


SAME_CODE = "the code that predicts is the code that sizes the pool"
NOT_TOUCHED = (
    "pages that no token was written to yet: the system commits CPU memory on first touch, in its own page size"
)
THE_REST = "the interpreter, torch and its buffers; less where weights are mapped from their file and not yet read"


def difference(name: str, count: int, why: str) -> View:
    return {"name": name, "bytes": count, "why": why}


def process_bytes(books: View, info: EngineInfo) -> View:
    """The engine process as the system measures it. On a GPU neither weights nor pool are in it."""
    inside = info.weights_bytes + books["kv_resident_bytes"] if info.device == "cpu" else 0
    measured = books["rss_bytes"]
    return {
        "resident": measured,
        "weights": info.weights_bytes,
        "workspace": info.workspace_bytes,
        "differences": [difference("resident - weights - KV resident", measured - inside, THE_REST)],
    }


def requests(books: View, caller: Caller) -> View:
    """/kv/requests, made of the engine's kv_requests: the caller's rows, all others as one sum, and the totals."""
    rows = [request_view(row) for row in books["requests"]]
    own = [row for row in rows if caller.sees(row["tenant"])]
    others = [row for row in rows if not caller.sees(row["tenant"])]
    return {
        "requests": own,
        "others": sums(others) if not caller.sees_all else None,
        "totals": sums(rows),
        "active_bytes": books["active_bytes"],
    }


def request_view(row: View) -> View:
    shown = {name: value for name, value in row.items() if name != "byte_ns"}
    return shown | {"pages": row["own_pages"] + row["shared_pages"], "byte_seconds": seconds(row["byte_ns"])}


def sums(rows: list[View]) -> View:
    return {"count": len(rows)} | {column: sum(row[column] for row in rows) for column in COLUMNS}


def stats_view(stats: EngineStats, now_ns: int) -> View:
    """The pool in one glance, for the stream. Byte-seconds are carried on to now: they move while the engine idles."""
    active_byte_ns, cached_byte_ns = stats.byte_ns_at(now_ns)
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "pages": {"active": stats.pages_active, "cached": stats.pages_cached, "free": stats.pages_free},
        "bytes": {"active": stats.active_bytes, "cached": stats.cached_bytes, "written": stats.written_kv_bytes},
        "slots": {"used": stats.slots_used, "allocated": stats.slots_allocated},
        "shared_bytes_saved": stats.shared_bytes_saved,
        "byte_seconds": {"active": seconds(active_byte_ns), "cached": seconds(cached_byte_ns)},
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_cache": {"queries": stats.prefix_queries, "hits": stats.prefix_hits},
        "preemptions": stats.preemptions,
        "evictions": stats.evictions,
        "steps": stats.steps,
        "step_seconds": stats.step_seconds,
    }
