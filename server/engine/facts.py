"""The engine as a whole, in plain data: what it is told at its start, what then holds for its life, and what it counts.

Knows no request. The HTTP process reads it too: importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process is told when it starts. model: a canonical folder. None: the engine chooses."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    page_size: int = 16
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue: int = 256
    threads: int | None = None
    batch_invariant: bool = False
    attention_backend: str = "auto"
    prefix_caching: bool = True
    tensor_parallel_size: int = 1


class EngineStats(NamedTuple):
    """Counters (since start, only rising) and gauges (now) after a step. Page counts leave out scratch pages.

    active + cached + free = pages of all groups. slots_used counts tokens held by active pages,
    slots_allocated = active pages * page_size.
    """

    running: int = 0
    waiting: int = 0
    pages_active: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    slots_used: int = 0
    slots_allocated: int = 0
    shared_bytes_saved: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    nan_rows: int = 0
    active_byte_ns: int = 0
    cached_byte_ns: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    rss_bytes: int = 0
    written_kv_bytes: int = 0
    active_bytes: int = 0
    cached_bytes: int = 0
    now_ns: int = 0

    def byte_ns_at(self, now_ns: int) -> tuple[int, int]:
        """Byte-nanoseconds of active and of cached pages at now_ns (time.monotonic_ns), had nothing changed since."""
        elapsed = max(0, now_ns - self.now_ns) if self.now_ns else 0
        return self.active_byte_ns + elapsed * self.active_bytes, self.cached_byte_ns + elapsed * self.cached_bytes


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that hold for the life of the engine. Bytes of the pool: predicted by arithmetic, then allocated.

    mixed_chunk: prompt tokens in a step that also decodes, on a CPU measured at the start; None where only the budget
    bounds it.
    capacity_tokens: tokens the pool can keep. token_bytes: bytes of one token in all layers.
    """

    vocab_size: int
    max_model_len: int
    device: str
    dtype: str
    kv_dtype: str
    backend: str
    threads: int
    batch_invariant: bool
    page_size: int
    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    kv_bytes_predicted: int
    kv_bytes_allocated: int
    kv_bytes_resident: int
    weights_bytes: int
    workspace_bytes: int
    rss_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    pid: int
    phases: tuple[tuple[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    mixed_chunk: int | None = None
    capacity_tokens: int = 0
    token_bytes: int = 0
    graphs: int = 0
    graph_seconds: float = 0.0
    graph_bytes: int = 0
    quantization: str | None = None

    def stats_at_start(self) -> EngineStats:
        """What holds until the first step: every page is free."""
        return EngineStats(
            pages_free=sum(self.num_pages) - len(self.num_pages),
            rss_bytes=self.rss_bytes,
        )
