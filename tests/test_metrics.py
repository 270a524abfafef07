"""/metrics: the names and labels that dashboards and routers read, and books that add up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.client import EngineClient
from server.engine.facts import EngineConfig, EngineStats
from server.metrics import Metrics
from tests.conftest import LiveServer
from tests.scripted_engine import NUM_PAGES, info

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
)

OURS = {
    "ropeway_kv_pool_bytes": ("gauge", {"kind"}),
    "ropeway_kv_pages": ("gauge", {"state"}),
    "ropeway_kv_token_slots": ("gauge", {"kind"}),
    "ropeway_kv_byte_seconds": ("counter", {"state"}),
    "ropeway_kv_shared_bytes_saved": ("gauge", set[str]()),
    "ropeway_kv_evictions": ("counter", set[str]()),
    "ropeway_kv_capacity_tokens": ("gauge", set[str]()),
    "ropeway_kv_bytes_per_token": ("gauge", set[str]()),
    "ropeway_weights_bytes": ("gauge", set[str]()),
    "ropeway_workspace_bytes": ("gauge", set[str]()),
    "ropeway_process_resident_bytes": ("gauge", {"process"}),
    "ropeway_startup_seconds": ("gauge", {"phase"}),
    "ropeway_requests_rejected": ("counter", {"status", "reason"}),
    "ropeway_engine_steps": ("counter", set[str]()),
    "ropeway_nan_rows": ("counter", set[str]()),
    "ropeway_event_loop_lateness_seconds": ("histogram", set[str]()),
}
CONTRACT = (
    OURS
    | {f"vllm:{name}": ("gauge", set[str]()) for name in GAUGES}
    | {f"vllm:{name.removesuffix('_total')}": ("counter", set[str]()) for name in COUNTERS}
    | {f"vllm:{name}": ("histogram", set[str]()) for name in HISTOGRAMS}
    | {"vllm:request_success": ("counter", {"finished_reason"})}
)
"""Family -> type and labels beside model_name and engine; on the wire a counter's samples end in _total."""
LATENCY = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
BUCKETS = {
    "vllm:time_to_first_token_seconds": FIRST,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
}


def samples(text: str) -> Samples:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(read: Samples, name: str, **labels: str) -> float:
    """The sample with exactly these labels beside model_name and engine."""
    return read[(name, frozenset({"model_name": "m", "engine": "0"}.items() | labels.items()))]


def with_stats(**stats: Any) -> Samples:
    client = EngineClient(EngineConfig("x"))
    client.info = info(client.config)
    client.stats = EngineStats(**stats) if stats else client.info.stats_at_start()
    return samples(Metrics("m", lambda: client).render().decode())


def test_every_name_is_there_at_zero_before_the_engine() -> None:
    read = samples(Metrics("m", lambda: None).render().decode())
    for name in (*GAUGES, *COUNTERS):
        assert value(read, f"vllm:{name}") == 0
    for name in HISTOGRAMS:
        assert value(read, f"vllm:{name}_count") == 0
    for reason in ("stop", "length", "abort", "error"):
        assert value(read, "vllm:request_success_total", finished_reason=reason) == 0
    for state in ("active", "cached", "free"):
        assert value(read, "ropeway_kv_pages", state=state) == 0


def test_the_contract_of_names_types_and_labels() -> None:
    families = list(text_string_to_metric_families(Metrics("m", lambda: None).render().decode()))
    found = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in families
    }
    assert found == {name: (kind, labels | {"model_name", "engine"}) for name, (kind, labels) in CONTRACT.items()}
    assert all(family.documentation for family in families)


def test_buckets_are_vllms() -> None:
    for family in text_string_to_metric_families(Metrics("m", lambda: None).render().decode()):
        bounds = " ".join(sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket"))
        assert bounds.removesuffix(" +Inf") == BUCKETS.get(family.name, bounds.removesuffix(" +Inf"))


def test_byte_seconds_move_while_the_engine_idles_and_never_fall() -> None:
    client = EngineClient(EngineConfig("x"))
    client.info = info(client.config)
    metrics = Metrics("m", lambda: client)

    def scraped(**stats: int) -> list[float]:
        client.stats = EngineStats(**stats)
        read = samples(metrics.render().decode())
        return [value(read, "ropeway_kv_byte_seconds_total", state=state) for state in ("active", "cached")]

    now = time.monotonic_ns()
    held = {"active_bytes": 10**9, "active_byte_ns": 5 * 10**18, "cached_byte_ns": 7 * 10**9}
    active, cached = scraped(**held, now_ns=now - 10**9)
    assert active >= 6 * 10**9 and cached == 7
    assert scraped(**held, now_ns=now)[0] >= active, "the step released its pages before the scrape knew"
    assert scraped()[1] == cached, "a counter that falls looks like a restart"


def test_pages_sum_to_all_that_can_be_given_out() -> None:
    for stats in ({}, {"pages_active": 4, "pages_cached": 10, "pages_free": 50}):
        read = with_stats(**stats)
        assert sum(value(read, "ropeway_kv_pages", state=state) for state in ("active", "cached", "free")) == 64


def test_usage_counts_cached_pages_as_free() -> None:
    read = with_stats(pages_active=16, pages_cached=40, pages_free=8)
    assert value(read, "vllm:kv_cache_usage_perc") == 0.25


def test_cache_config_info_has_an_integer_of_blocks() -> None:
    [labels] = [dict(key[1]) for key in with_stats() if key[0] == "vllm:cache_config_info"]
    assert int(labels["num_gpu_blocks"]) == NUM_PAGES - 1 and int(labels["block_size"]) == 4
    assert labels["enable_prefix_caching"] == "True" and labels["cache_dtype"] == "float32"


def test_bytes() -> None:
    read = with_stats(written_kv_bytes=99, rss_bytes=7)
    predicted, allocated, written = (
        value(read, "ropeway_kv_pool_bytes", kind=kind) for kind in ("predicted", "allocated", "written")
    )
    assert predicted == allocated == NUM_PAGES * 1024 and written == 99
    assert value(read, "ropeway_weights_bytes") == 4096
    assert value(read, "ropeway_process_resident_bytes", process="engine") == 7
    assert value(read, "ropeway_process_resident_bytes", process="http") > 1e6


def test_servers_do_not_share_a_registry() -> None:
    one, two = Metrics("m", lambda: None), Metrics("m", lambda: None)
    one.rejected(429)
    read = [samples(metrics.render().decode()) for metrics in (one, two)]
    refused = [value(found, "ropeway_requests_rejected_total", status="429", reason="queue_full") for found in read]
    assert refused == [1, 0]


def test_a_request_is_timed_and_counted_once() -> None:
    metrics = Metrics("m", lambda: None)
    clock = metrics.request(prompt_tokens=7)
    for _ in range(3):
        clock.token()
    clock.finished("stop", 3)
    metrics.request(1).finished("abort", 0)
    read = samples(metrics.render().decode())
    assert value(read, "vllm:time_to_first_token_seconds_count") == 1
    assert value(read, "vllm:inter_token_latency_seconds_count") == 2
    assert value(read, "vllm:request_prompt_tokens_sum") == 7
    assert value(read, "vllm:request_generation_tokens_sum") == 3
    assert value(read, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(read, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(read, "vllm:request_success_total", finished_reason="abort") == 1


def test_each_choice_is_a_request_as_in_vllm(live_server: LiveServer) -> None:
    """Dashboards that divide one family by another rely on it."""
    names = (
        "vllm:request_success_total",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_generation_tokens_sum",
    )

    def scrape() -> dict[str, float]:
        read = samples(httpx.get(f"{live_server.url}/metrics").text)
        return {name: sum(value for (found, _), value in read.items() if found == name) for name in names}

    before = scrape()
    body = {"prompt": ["four", "three"], "max_tokens": 2, "ignore_eos": True, "n": 3}
    assert httpx.post(f"{live_server.url}/v1/completions", json=body, timeout=60).status_code == 200
    made = [after - before[name] for name, after in scrape().items()]
    assert made == [6, 6, 6, 6, 3 * (4 + 5), 6 * 2]


def test_a_real_server_keeps_books_that_add_up(live_server: LiveServer, tiny_model: Callable[..., Path]) -> None:
    def scrape() -> dict[str, float]:
        text = httpx.get(f"{live_server.url}/metrics").text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        picked = {sample.name: sample.value for sample in found if set(sample.labels) == {"model_name", "engine"}}
        for sample in found:
            if sample.name in ("ropeway_kv_pages", "ropeway_kv_pool_bytes"):
                kind = cast(str, sample.labels.get("state") or sample.labels.get("kind"))
                picked[f"{sample.name}.{kind}"] = sample.value
        return picked

    before = scrape()
    body = {"prompt": "count these", "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{live_server.url}/v1/completions", json=body, timeout=60).status_code == 200
    after = scrape()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 5
    pages = [after[f"ropeway_kv_pages.{state}"] for state in ("active", "cached", "free")]
    assert sum(pages) == sum(before[f"ropeway_kv_pages.{state}"] for state in ("active", "cached", "free"))
    assert pages[0] == 0 and after["vllm:num_requests_running"] == 0
    assert after["ropeway_kv_pool_bytes.predicted"] == after["ropeway_kv_pool_bytes.allocated"]
    assert tiny_model().name in httpx.get(f"{live_server.url}/v1/models").text
