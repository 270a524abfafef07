"""What the mock server plays and remembers: scripts, the queue for its slots, prompts seen, the log of what was sent.

Knows nothing about sockets.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

FAULTS = (
    "http_4xx",
    "http_5xx",
    "stream_error",
    "no_done",
    "truncated",
    "reset",
    "non_json",
    "stall",
    "empty",
    "no_usage",
    "not_a_stream",
)


@dataclass(slots=True)
class Script:
    """Seconds to the first token, seconds between chunks, tokens in each chunk, and what goes wrong."""

    ttft: float = 0.05
    gap: float = 0.02
    per_chunk: int = 1
    jitter: float = 0.0
    slots: int = 0
    fault: str = ""
    fault_share: float = 1.0


@dataclass(slots=True)
class Exchange:
    """One request and what was sent for it; this is a line of the log. Seconds of the monotonic clock."""

    id: str
    received: float
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    chat: bool
    script: Script
    every_usage: bool
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    ended: float = 0.0
    fault: str = ""

    def line(self) -> str:
        names = ("id", "received", "prompt_tokens", "cached_tokens", "chunk_times", "chunk_tokens", "ended", "fault")
        return json.dumps({name: getattr(self, name) for name in names})


class Mock:
    """The state that all connections share: the log, the queue for `slots`, the prompts seen, the counters."""

    def __init__(
        self, script: Script, log: Callable[[Exchange], None], clock: Callable[[], float], seed: int = 0
    ) -> None:
        self.script, self.log, self.clock = script, log, clock
        self.random = Random(seed)
        self.running, self.waiting = 0, deque[Callable[[], None]]()
        self.seen: dict[int, None] = {}
        self.hits = self.queries = self.preemptions = self.held_tokens = 0

    def admit(self, start: Callable[[], None]) -> None:
        """Start now, or when a slot is free. A started exchange must `leave`."""
        self.waiting.append(start)
        self._fill()

    def leave(self) -> None:
        self.running -= 1
        self._fill()

    def _fill(self) -> None:
        while self.waiting and not (self.script.slots and self.running >= self.script.slots):
            self.running += 1
            self.waiting.popleft()()

    def cached(self, prompt: Any, tokens: int) -> int:
        """Whole blocks of 16 of a prompt seen before, less one token; prefixes are compared block by block."""
        words = prompt if isinstance(prompt, list) else str(prompt).split()
        chain, hit = 0, 0
        for end in range(16, len(words) + 1, 16):
            chain = hash((chain, tuple(words[end - 16 : end])))
            hit = end if chain in self.seen and hit == end - 16 else hit
            self.seen[chain] = None
        while len(self.seen) > 100_000:
            self.seen.pop(next(iter(self.seen)))
        self.queries, self.hits = self.queries + tokens, self.hits + min(hit, tokens - 1)
        return min(hit, tokens - 1)

    def metrics(self) -> str:
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": min(1.0, self.held_tokens / 16 / 1000),
            "num_preemptions_total": self.preemptions,
            "prefix_cache_queries_total": self.queries,
            "prefix_cache_hits_total": self.hits,
            'cache_config_info{block_size="16",num_gpu_blocks="1001"}': 1,
        }
        return "".join(f"vllm:{name} {value}\n" for name, value in values.items())
