"""Every metric in one table: vLLM's names for what dashboards and routers read, ropeway_* for what nobody else has.

Knows the engine's statistics and finished requests, no routes. One registry a server; gauges are computed when read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model.memory import rss_bytes
from server.client import EngineClient
from server.engine.facts import EngineInfo, EngineStats
from server.engine.messages import StepOutput
from server.histogram import Histogram

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_TIME_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LATENESS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
COUNT_BUCKETS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
ITERATION_BUCKETS = (1, *(2**power for power in range(3, 15)))
REASONS = {
    400: "bad_request", 401: "no_valid_key", 404: "not_found", 405: "wrong_method", 408: "slow_body",
    413: "body_too_large", 415: "encoding", 429: "queue_full", 499: "client_gone", 500: "fault", 503: "not_ready",
}  # fmt: skip
"""Why a request was refused, by the status it got."""
PHASES = ("convert", "kernels", "load", "allocate", "warm_up")
disable_created_metrics()  # type: ignore[no-untyped-call]
LABELS = ["model_name", "engine"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that the engine reports: read at scrape time, 0 before there is an engine."""

    name: str
    help: str
    read: Callable[[EngineStats, EngineInfo | None], float]
    counter: bool = False
    extra: tuple[tuple[str, str], ...] = ()


def pages(stats: EngineStats) -> int:
    return stats.pages_active + stats.pages_cached + stats.pages_free


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def fact(name: str) -> Callable[[EngineStats, EngineInfo | None], float]:
    return lambda stats, info: getattr(info, name) if info is not None else 0


def stat(name: str) -> Callable[[EngineStats, EngineInfo | None], float]:
    return lambda stats, info: getattr(stats, name)


def byte_seconds(state: int) -> Callable[[EngineStats, EngineInfo | None], float]:
    """Carried on from the last step to now: time costs while the engine idles."""
    return lambda stats, info: stats.byte_ns_at(time.monotonic_ns())[state] / 1e9


POOL, PAGES, SLOTS = "ropeway_kv_pool_bytes", "ropeway_kv_pages", "ropeway_kv_token_slots"
POOL_HELP = "Bytes of the KV pool: predicted by arithmetic, allocated, of pages written so far"
PAGES_HELP = "KV pages by state; the states sum to all pages that can be given out"
BYTE_SECONDS = "ropeway_kv_byte_seconds"
BYTE_SECONDS_HELP = "Bytes of KV pages times seconds held by requests (active) or kept for reuse (cached)"
SLOTS_HELP = "Token slots of active pages: allocated, and used by a token"

READINGS = (
    Reading("vllm:num_requests_running", "Sequences in the running batch", stat("running")),
    Reading("vllm:num_requests_waiting", "Sequences that wait", stat("waiting")),
    Reading(
        "vllm:kv_cache_usage_perc",
        "KV pages held by running sequences / all pages, 0 to 1; idle cached pages count as free",
        lambda stats, info: share(stats.pages_active, pages(stats)),
    ),
    Reading("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stat("prefix_queries"), True),
    Reading("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stat("prefix_hits"), True),
    Reading("vllm:num_preemptions", "Sequences that lost their pages and were recomputed", stat("preemptions"), True),
    Reading("vllm:prompt_tokens", "Prompt tokens processed", stat("prompt_tokens"), True),
    Reading("vllm:generation_tokens", "Tokens generated", stat("generation_tokens"), True),
    Reading(POOL, POOL_HELP, fact("kv_bytes_predicted"), extra=(("kind", "predicted"),)),
    Reading(POOL, POOL_HELP, fact("kv_bytes_allocated"), extra=(("kind", "allocated"),)),
    Reading(
        POOL,
        POOL_HELP,
        stat("written_kv_bytes"),
        extra=(("kind", "written"),),
    ),
    Reading(PAGES, PAGES_HELP, stat("pages_free"), extra=(("state", "free"),)),
    Reading(PAGES, PAGES_HELP, stat("pages_active"), extra=(("state", "active"),)),
    Reading(PAGES, PAGES_HELP, stat("pages_cached"), extra=(("state", "cached"),)),
    Reading(SLOTS, SLOTS_HELP, stat("slots_used"), extra=(("kind", "used"),)),
    Reading(SLOTS, SLOTS_HELP, stat("slots_allocated"), extra=(("kind", "allocated"),)),
    Reading("ropeway_kv_shared_bytes_saved", "Bytes that shared pages save now", stat("shared_bytes_saved")),
    Reading("ropeway_kv_evictions", "Cached pages given to another sequence", stat("evictions"), True),
    Reading(BYTE_SECONDS, BYTE_SECONDS_HELP, byte_seconds(0), True, (("state", "active"),)),
    Reading(BYTE_SECONDS, BYTE_SECONDS_HELP, byte_seconds(1), True, (("state", "cached"),)),
    Reading("ropeway_kv_capacity_tokens", "Tokens that the KV pool can keep", fact("capacity_tokens")),
    Reading("ropeway_kv_bytes_per_token", "Bytes of one token's KV in all layers", fact("token_bytes")),
    Reading("ropeway_weights_bytes", "Bytes of the weights as loaded", fact("weights_bytes")),
    Reading("ropeway_workspace_bytes", "Bytes of work buffers", fact("workspace_bytes")),
    Reading(
        "ropeway_process_resident_bytes",
        "Resident memory by process",
        stat("rss_bytes"),
        extra=(("process", "engine"),),
    ),
    Reading(
        "ropeway_process_resident_bytes",
        "Resident memory by process",
        lambda stats, info: rss_bytes(),
        extra=(("process", "http"),),
    ),
    Reading("ropeway_engine_steps", "Forwards since start", stat("steps"), True),
    Reading("ropeway_nan_rows", "Rows ended since their logits were not finite", stat("nan_rows"), True),
)


class EngineReadings:
    """The table as a Prometheus collector. A counter never falls, not even by what was carried on beyond a step."""

    def __init__(self, model_name: str, client: Callable[[], EngineClient | None]) -> None:
        self._labels, self._client = [model_name, "0"], client
        self._highest: dict[Reading, float] = {}
        self.phases = dict.fromkeys(PHASES, 0.0)

    def collect(self) -> Iterator[Metric]:
        client = self._client()
        stats, info = (client.stats, client.info) if client is not None else (EngineStats(), None)
        families: dict[str, Metric] = {}
        for reading in READINGS:
            kind = CounterMetricFamily if reading.counter else GaugeMetricFamily
            names, values = [name for name, _ in reading.extra], [value for _, value in reading.extra]
            if reading.name not in families:
                families[reading.name] = kind(reading.name, reading.help, labels=LABELS + names)
            value = reading.read(stats, info)
            if reading.counter:
                value = self._highest[reading] = max(value, self._highest.get(reading, 0))
            families[reading.name].add_metric(self._labels + values, value)  # type: ignore[attr-defined]
        yield from families.values()
        yield self._startup(info)
        yield from self._cache_config(info)

    def _startup(self, info: EngineInfo | None) -> Metric:
        seconds = self.phases | dict(info.phases if info is not None else ())
        family = GaugeMetricFamily(
            "ropeway_startup_seconds", "Time of each phase of the start", labels=[*LABELS, "phase"]
        )
        for phase, value in seconds.items():
            family.add_metric([*self._labels, phase], value)
        return family

    def _cache_config(self, info: EngineInfo | None) -> Iterable[Metric]:
        """vLLM's way to publish settings: a gauge of 1 whose labels hold them. Routers parse num_gpu_blocks."""
        if info is None:
            return
        blocks = sum(info.num_pages) - len(info.num_pages)
        facts = {
            "block_size": info.page_size,
            "num_gpu_blocks": blocks,
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": info.prefix_caching,
            "kv_cache_memory_bytes": info.kv_bytes_allocated,
            "kv_cache_size_tokens": info.capacity_tokens,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache", labels=LABELS + list(facts))
        family.add_metric(self._labels + [str(value) for value in facts.values()], 1)
        yield family


class Metrics:
    """The registry of one server, and what it observes itself."""

    def __init__(self, model_name: str, client: Callable[[], EngineClient | None]) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineReadings(model_name, client)
        self.registry.register(self.engine)
        self.labels = (model_name, "0")
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to first token", TTFT_BUCKETS
        )
        self.between = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two steps of a choice", TOKEN_TIME_BUCKETS
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a token after the first", TOKEN_TIME_BUCKETS
        )
        self.latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to last token", LATENCY_BUCKETS
        )
        self.queue = self._histogram("vllm:request_queue_time_seconds", "Time spent waiting", LATENCY_BUCKETS)
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "Time spent in prefill", LATENCY_BUCKETS)
        self.decode = self._histogram("vllm:request_decode_time_seconds", "Time spent in decode", LATENCY_BUCKETS)
        self.prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request; each choice is one, as in vLLM", COUNT_BUCKETS
        )
        self.generated = self._histogram(
            "vllm:request_generation_tokens",
            "Generated tokens of a request; each choice is one, as in vLLM",
            COUNT_BUCKETS,
        )
        self.inference = self._histogram("vllm:request_inference_time_seconds", "Prefill and decode", LATENCY_BUCKETS)
        self.iteration = self._histogram("vllm:iteration_tokens_total", "Tokens of one forward", ITERATION_BUCKETS)
        self.lateness = self._histogram(
            "ropeway_event_loop_lateness_seconds", "By how much the HTTP process was late", LATENESS_BUCKETS
        )
        self.success = Counter(
            "vllm:request_success",
            "Requests by the way they ended; each choice is one, as in vLLM",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._rejected = Counter(
            "ropeway_requests_rejected",
            "Requests refused, by status and reason",
            [*LABELS, "status", "reason"],
            registry=self.registry,
        )
        for status, name in REASONS.items():
            self._rejected.labels(*self.labels, str(status), name)
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(*self.labels, reason)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help, dict(zip(LABELS, self.labels, strict=True)), buckets)
        self.registry.register(histogram)
        return histogram

    def observe_step(self, output: StepOutput) -> None:
        if output.stats.step_tokens:
            self.iteration.observe(output.stats.step_tokens)
        for row in output.rows:
            if row.times is not None and row.finish is not None:
                self.queue.observe(row.times.queue)
                self.prefill.observe(row.times.prefill)
                self.decode.observe(row.times.decode)
                self.inference.observe(row.times.prefill + row.times.decode)

    def rejected(self, status: int) -> None:
        self._rejected.labels(*self.labels, str(status), REASONS.get(status, "other")).inc()

    def request(self, prompt_tokens: int) -> RequestClock:
        return RequestClock(self, prompt_tokens)

    def render(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class RequestClock:
    """Times one choice: token() at each delta, finished() at its end.

    vLLM makes n > 1 into n requests, each with its prompt and its end in the request metrics. Dashboards are made for
    that, so a choice is a request here too.
    """

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._prompt_tokens = metrics, prompt_tokens
        self._start = time.monotonic()
        self._first = self._last = 0.0

    def token(self) -> None:
        now = time.monotonic()
        if not self._first:
            self._first = now
            self._metrics.first_token.observe(now - self._start)
        else:
            self._metrics.between.observe(now - self._last)
        self._last = now

    def since_first_token(self) -> float:
        return time.monotonic() - self._first if self._first else 0.0

    def finished(self, reason: str, tokens: int) -> None:
        metrics = self._metrics
        metrics.success.labels(*metrics.labels, reason).inc()
        if reason in ("abort", "error"):
            return
        metrics.latency.observe(time.monotonic() - self._start)
        metrics.prompt.observe(self._prompt_tokens)
        metrics.generated.observe(tokens)
        if tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (tokens - 1))
