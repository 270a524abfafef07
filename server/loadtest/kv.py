"""What the KV cache did during a run, read from the server's /metrics.

Knows vLLM's and Ropeway's metric names; knows nothing about single requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from server.loadtest.http import HttpClient, HttpError

KEEP = 1000
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")
PART = re.compile(r'\b(?:kind|state)="([^"]*)"')
GAUGES = {
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total",),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
}
POOL_BYTES = ("ropeway_kv_pool_bytes[allocated]",)
BYTE_SECONDS = ("ropeway_kv_byte_seconds_total[active]",)


def parse_metrics(text: str) -> dict[str, float]:
    """Sums over label sets by name, and by `name[x]` where a label kind or state is x; the block size and count."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if not found:
            continue
        name, labels, value = found.groups()
        part = PART.search(labels or "")
        for key in (name, f"{name}[{part[1]}]") if part else (name,):
            values[key] = values.get(key, 0.0) + float(value)
        if name.endswith("cache_config_info"):
            for label in ("block_size", "num_gpu_blocks"):
                number = re.search(rf'{label}="(\d+)"', labels or "")
                values[label] = float(number[1]) if number else 0.0
    return values


def pick(values: dict[str, float], names: Iterable[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)


@dataclass(slots=True)
class KvWatch:
    """Reads /metrics once a second. Keeps at most 1,000 points: beyond that every other goes and the step doubles."""

    client: HttpClient
    bytes_per_token: float | None = None
    step: float = 1.0
    points: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    peak: float = 0.0

    async def scrape(self) -> bool:
        try:
            status, body = await self.client.fetch("GET", "/metrics", seconds=5.0)
        except HttpError:
            return False
        if status != 200:
            return False
        self.last = parse_metrics(body.decode("utf-8", "replace"))
        self.first = self.first or self.last
        gauges = {name: value for name, names in GAUGES.items() if (value := pick(self.last, names)) is not None}
        if not gauges:
            return False
        self.peak = max(self.peak, gauges.get("usage", 0.0))
        self.points.append({"at": self.client.clock(), **gauges})
        if len(self.points) > KEEP:
            self.points, self.step = self.points[::2], self.step * 2
        return True

    async def watch(self) -> None:
        while await self.scrape():
            await asyncio.sleep(self.step)

    def pool_bytes(self) -> float | None:
        """The pool's size: from the server, or from its block count and the bytes a token costs (if given)."""
        own = pick(self.last, POOL_BYTES)
        blocks, size = self.last.get("num_gpu_blocks"), self.last.get("block_size")
        if own is None and self.bytes_per_token and blocks and size:
            return blocks * size * self.bytes_per_token
        return own

    def summary(self, output_rate: float, requests: int, origin: float) -> dict[str, Any] | None:
        """Usage as a share of the pool, counts over the run, bytes; None where the server has no such metrics.

        Usage is None too where the run ended before a reading fell into it.
        """
        if not self.points:
            return None
        within = self.points[-1]["at"] - self.points[0]["at"] >= self.step
        usages = [point["usage"] for point in self.points if within and "usage" in point]
        running = [point["running"] for point in self.points if point.get("running")]
        mean = sum(usages) / len(usages) if usages else None
        pool, deltas, held = self.pool_bytes(), self._deltas(), self._delta(BYTE_SECONDS)
        busy = sum(point.get("usage", 0) / point["running"] for point in self.points if point.get("running"))
        return {
            "usage_mean": mean,
            "usage_peak": self.peak if usages else None,
            **deltas,
            "pool_bytes": pool,
            "bytes_per_request": pool * busy / len(running) if pool and running else None,
            "byte_seconds_per_request": held / requests if held is not None and requests else None,
            "tokens_per_second_per_gib": output_rate / (pool / 2**30) if pool else None,
            "points": [point | {"at": point["at"] - origin} for point in self.points],
        }

    def _delta(self, names: Iterable[str]) -> float | None:
        now, before = pick(self.last, names), pick(self.first, names)
        return None if now is None or before is None else now - before

    def _deltas(self) -> dict[str, float | None]:
        found = {name: self._delta(names) for name, names in COUNTERS.items()}
        queries, hits = found.pop("queries"), found.pop("hits")
        found["hit_rate"] = hits / queries if queries and hits is not None else None
        return found
