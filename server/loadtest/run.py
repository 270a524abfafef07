"""One run: cache brought to the state asked for, load applied, everything watched, figures gathered.

Knows nothing about how runs are combined or printed.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from server.loadtest.api import Api, reset_cache
from server.loadtest.drive import Target, closed_loop, converse, open_loop
from server.loadtest.http import HttpClient
from server.loadtest.kv import KvWatch
from server.loadtest.machine import CpuWatch, LoopLag
from server.loadtest.measure import Figures, spread_of
from server.loadtest.progress import Progress
from server.loadtest.record import Record
from server.loadtest.slo import Slo
from server.loadtest.timeline import Timeline
from server.loadtest.workload import Conversation, Filler, Turn

Work = Callable[[Filler, str], Iterator[Conversation]]
EXAMPLES = 200


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop with `users`, or open loop at `offsets` (seconds; `rate` is their mean, requests per second)."""

    label: str
    users: int | None = None
    offsets: array[float] | None = None
    rate: float | None = None
    requests: int | None = None
    seconds: float | None = None

    @property
    def kind(self) -> str:
        return "open loop" if self.users is None else "closed loop"

    def expected(self) -> int | None:
        return self.requests if self.offsets is None else len(self.offsets)


@dataclass(frozen=True, slots=True)
class Settings:
    """What stays the same from run to run. Times in seconds."""

    work: Work
    sharing: bool
    cache: str = "cold"
    distinct: int = 16
    seed: int = 0
    nonce: str = ""
    slo: Slo | None = None
    timeout: float = 600.0
    max_lag: float = 0.010
    max_in_flight: int = 4096
    warmup: int = 1
    kv_bytes_per_token: float | None = None
    sink: Callable[[dict[str, Any]], None] | None = None
    quiet: bool = False


@dataclass(slots=True)
class Server:
    """One server under test, probed: how to ask it and how long its words are."""

    name: str
    url: str
    client: HttpClient
    api: Api
    filler: Filler
    local_ports: list[int] = field(default_factory=list)

    def target(self, settings: Settings) -> Target:
        return Target(self.client, self.api, settings.timeout)


@dataclass(slots=True)
class Gathering:
    """Where the records of one run go: figures, timeline, the first examples, an optional file of all."""

    figures: Figures
    timeline: Timeline
    settings: Settings
    examples: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, record: Record) -> None:
        self.figures.add(record)
        self.timeline.add(record)
        if len(self.examples) < EXAMPLES:
            self.examples.append(as_row(record))
        if self.settings.sink:
            self.settings.sink(as_row(record))


def as_row(record: Record) -> dict[str, Any]:
    """One request for a file: times in seconds of the client's clock (`intended`) and from the intended start."""
    return {
        "index": record.index,
        "intended": record.intended,
        "sent": record.offset(record.sent),
        "connected": record.offset(record.connected),
        "first_byte": record.offset(record.first_byte),
        "first_token": record.offset(record.first),
        "last_token": record.offset(record.last),
        "end": record.offset(record.end),
        "status": record.status,
        "error": record.error,
        "detail": record.detail,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "token_source": record.token_source,
        "finish_reason": record.finish_reason,
        "chunk_times": [t - record.intended for t in record.chunk_times],
        "chunk_tokens": list(record.chunk_tokens),
    }


async def run_once(
    server: Server, load: Load, settings: Settings, stop: Callable[[Figures], bool] | None = None
) -> dict[str, Any]:
    """Everything measured in one run, as plain data."""
    target = server.target(settings)
    nonce = settings.nonce or (secrets.token_hex(4) if settings.cache == "cold" else "fixed")
    work = settings.work(server.filler, f"{settings.seed}:{nonce}")
    was_reset = settings.cache == "cold" and await reset_cache(server.client)
    await _warm_up(target, settings, server.filler, nonce)
    gc.collect()
    gc.freeze()  # what stands now is not walked again: a full collection would stall every stream
    clock = server.client.clock
    gathering = Gathering(Figures(settings.slo), Timeline(clock()), settings)
    lag, cpu, kv = LoopLag(clock), CpuWatch(server.local_ports), KvWatch(server.client, settings.kv_bytes_per_token)
    await kv.scrape()
    shown = Progress(f"{server.name} {load.label}", load.expected(), target, gathering.figures)
    watched = [lag.watch(), kv.watch()] + ([] if settings.quiet else [shown.show()])
    watchers = [asyncio.create_task(work) for work in watched]
    started = datetime.now(UTC).isoformat(timespec="seconds")
    held_back = await _apply(target, load, work, gathering, settings, stop)
    used = cpu.summary()
    await _end(watchers)
    await kv.scrape()
    summary = gathering.figures.summary()
    return {
        "server": server.name,
        "url": server.url,
        "model": server.api.model,
        "api": server.api.kind,
        "started": started,
        "label": load.label,
        "load": describe(load),
        "slo": settings.slo.text if settings.slo else None,
        **summary,
        "client": client_verdict(summary["send_lag"], spread_of(lag.held), used, held_back, settings.max_lag),
        "machine": used,
        "kv": kv.summary(summary["rates"]["output_rate"], summary["requests"]["ok"], gathering.timeline.origin),
        "cache": cache_verdict(settings, nonce, was_reset, summary["tokens"]),
        "timeline": gathering.timeline.rows(),
        "examples": gathering.examples,
    }


async def _apply(
    target: Target,
    load: Load,
    work: Iterator[Conversation],
    gathering: Gathering,
    settings: Settings,
    stop: Callable[[Figures], bool] | None,
) -> int:
    if load.users is not None:
        await closed_loop(target, work, load.users, gathering, load.requests, load.seconds)
        return 0
    assert load.offsets is not None
    figures = gathering.figures
    return await open_loop(
        target,
        work,
        load.offsets,
        gathering,
        settings.max_in_flight,
        (lambda: stop(figures)) if stop else lambda: False,
    )


async def _warm_up(target: Target, settings: Settings, filler: Filler, nonce: str) -> None:
    """Unmeasured requests: a few from another seed, or for a warm cache each prompt of the pool with one token."""
    if settings.cache == "warm":
        pool = islice(settings.work(filler, f"{settings.seed}:{nonce}"), settings.distinct)
        prompts = [Conversation((Turn(made.turns[0].prompt, 1),)) for made in pool]
    else:
        prompts = list(islice(settings.work(filler, f"warm-up:{secrets.token_hex(4)}"), settings.warmup))
    for prompt in prompts:
        await converse(target, prompt, target.client.clock(), lambda record: None)


async def _end(watchers: list[asyncio.Task[None]]) -> None:
    for watcher in watchers:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


def describe(load: Load) -> dict[str, Any]:
    return {
        "kind": load.kind,
        "concurrency": load.users,
        "rate": load.rate,
        "requests": load.requests,
        "seconds": load.seconds,
    }


def client_verdict(
    send_lag: dict[str, Any], loop_lag: dict[str, Any], cpu: dict[str, float | None], held_back: int, limit: float
) -> dict[str, Any]:
    """Whether this client, and not the server, set the figures; with the reasons."""
    reasons = [
        f"{name} p99 {held['p99'] * 1000:.1f} ms is over {limit * 1000:g} ms"
        for name, held in (("send lag", send_lag), ("loop lag", loop_lag))
        if held["count"] and held["p99"] > limit
    ]
    if (core := cpu["client_core"]) is not None and core > 0.9:
        reasons.append(f"this client used {core:.0%} of a core")
    if held_back:
        reasons.append(f"{held_back} requests waited because --max-in-flight was reached")
    return {"limited": bool(reasons), "reasons": reasons, "loop_lag": loop_lag}


def cache_verdict(settings: Settings, nonce: str, was_reset: bool, tokens: dict[str, Any]) -> dict[str, Any]:
    """The state of the prefix cache asked for, and whether the `cached_tokens` that the server reports agree."""
    cached, sent = tokens["cached"], tokens["input"]
    share = None if cached is None or not sent else cached / sent
    if share is None or settings.cache == "as-is" or settings.sharing:
        agrees = None
    else:
        agrees = share < 0.01 if settings.cache == "cold" else share > 0.5
    return {
        "asked": settings.cache,
        "nonce": nonce,
        "reset_by_server": was_reset,
        "cached_share": share,
        "agrees": agrees,
        "prompts_share_prefixes": settings.sharing,
    }
