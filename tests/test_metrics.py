"""/metrics: the names and labels that dashboards and routers read, and books that add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.client import EngineClient
from server.engine.messages import EngineConfig, EngineStats
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
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
)


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
    read = with_stats(resident_kv_bytes=99, rss_bytes=7)
    predicted, allocated, resident = (
        value(read, "ropeway_kv_pool_bytes", kind=kind) for kind in ("predicted", "allocated", "resident")
    )
    assert predicted == allocated == NUM_PAGES * 1024 and resident == 99
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
