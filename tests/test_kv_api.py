"""/kv/* and usage.kv_cache of a real server: callers, streams, and books that add up while requests run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

import httpx
import pytest

from server.caller import tenant_name
from server.loadtest.http import HttpClient
from server.loadtest.kv import KvWatch
from tests.conftest import LiveServer, ModelFactory, start_server

KEYS = ("--api-key", "alice", "--api-key", "bob", "--admin-api-key", "root")
LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("kv") / "server.log"
    live = start_server(tiny_model("llama"), log, "--page-size", "4", "--kv-cache-memory", "1MiB", *KEYS)
    try:
        live.wait_ready()
        yield live
    finally:
        live.process.kill()
        live.process.wait()


def get(server: LiveServer, path: str, key: str = "root") -> dict[str, Any]:
    reply = httpx.get(server.url + path, headers={"x-api-key": key}, timeout=60)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def complete(server: LiveServer, key: str = "alice", **body: Any) -> dict[str, Any]:
    body = {"prompt": "a prompt of more than one page", "max_tokens": 8, "ignore_eos": True} | body
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def streamed_usage(server: LiveServer, **body: Any) -> Any:
    body = {"prompt": "a prompt of more than one page", "max_tokens": 8, "ignore_eos": True, "stream": True} | body
    headers = {"x-api-key": "alice"}
    text = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return chunks[-1].get("usage")


Event = tuple[str, dict[str, Any]]


def events(server: LiveServer, key: str = "root") -> Generator[Event]:
    """(kind, data) of /kv/stream; closing the iterator closes the connection."""
    kind, headers = "", {"x-api-key": key}
    with httpx.stream("GET", f"{server.url}/kv/stream", headers=headers, timeout=60) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: {"):
                yield kind, json.loads(line[6:])


# ---- callers


@pytest.mark.parametrize("path", ["/kv/summary", "/kv/requests", "/kv/pages", "/kv/stream"])
def test_no_key_no_view(server: LiveServer, path: str) -> None:
    for headers in ({}, {"x-api-key": "mallory"}):
        assert httpx.get(server.url + path, headers=headers).status_code == 401


def test_an_open_server_shows_everything(live_server: LiveServer) -> None:
    assert httpx.get(f"{live_server.url}/kv/requests").json()["others"] is None


def test_rows_sum_to_totals_at_any_moment_and_tenants_see_their_own(server: LiveServer) -> None:
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(complete, server, key, **LONG, n=2) for key in ("alice", "bob")]
        seen = looked(server, running)
    assert any(len(view["requests"]) == 4 for _, view in seen), "both requests were never seen together"
    for key, view in seen:
        tenants = {row["tenant"] for row in view["requests"]}
        others = view["others"] or {"share_weighted_bytes": 0, "count": 0}
        weighted = sum(row["share_weighted_bytes"] for row in view["requests"]) + others["share_weighted_bytes"]
        assert weighted == view["totals"]["share_weighted_bytes"] == view["active_bytes"]
        assert len(view["requests"]) + others["count"] == view["totals"]["count"]
        if key != "root":
            assert tenants <= {tenant_name(key)} and view["others"] is not None


def looked(server: LiveServer, running: list[Future[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Views by everybody for as long as a request runs."""
    seen = []
    while not all(request.done() for request in running):
        seen += [(key, get(server, "/kv/requests", key)) for key in ("root", "alice", "bob")]
    return seen


# ---- summary and map


def test_the_summary_adds_up(server: LiveServer) -> None:
    complete(server)
    summary = get(server, "/kv/summary", "bob")
    pages, size = summary["pages"], summary["bytes"]
    assert pages["active"] + pages["cached"] + pages["free"] == pages["total"]
    assert size["active"] + size["cached"] + size["free"] + size["scratch"] == size["allocated"] == size["predicted"]
    assert summary["capacity_tokens"] == pages["total"] * 4
    assert summary["bytes_per_token"] * 4 == summary["groups"][0]["page_bytes"]
    assert 0 < size["resident"] <= size["allocated"] and summary["process"]["resident"] > 1 << 20
    assert {gap["name"]: gap["bytes"] for gap in size["differences"]} == {
        "allocated - predicted": 0,
        "allocated - resident": size["allocated"] - size["resident"],
    }
    assert summary["full_length_requests"] == pages["total"] // (512 // 4)


def test_byte_seconds_grow_while_the_engine_idles(server: LiveServer) -> None:
    complete(server)
    with closing(events(server)) as stream:
        seen = [data["stats"] for _, data in islice(stream, 5) if "stats" in data]
    cached = [stats["byte_seconds"]["cached"] for stats in seen]
    assert cached == sorted(set(cached)) and len(cached) >= 3


def states(shown: dict[str, Any], pages: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """Fold a snapshot or a delta into page -> [references, holders, hits]."""
    for group in shown["groups"]:
        for first, count, references, held_by, hits, _ in group["runs"]:
            holders = shown["held_by"][held_by] if held_by >= 0 else []
            pages |= {page: [references, holders, hits] for page in range(first, first + count)}
    return pages


def test_the_stream_leads_to_the_map(server: LiveServer) -> None:
    with closing(events(server)) as stream, ThreadPoolExecutor() as pool:
        kind, snapshot = next(stream)
        assert kind == "snapshot"
        pages = states(snapshot, {})
        running = pool.submit(complete, server, "alice", prompt="nobody sent this before", **LONG)
        generated, kinds, stats = snapshot["stats"]["generation_tokens"] + 480, set(), snapshot["stats"]
        while stats["generation_tokens"] < generated or stats["running"]:
            kind, data = next(stream)
            kinds.add(kind)
            if kind == "delta":
                pages, stats = states(data, pages), data["stats"]
        running.result()
    assert sorted(pages) == list(range(1, get(server, "/kv/summary")["pages"]["total"] + 1))
    assert kinds == {"delta", "requests"}
    assert pages == states(get(server, "/kv/pages"), {})
    assert sum(references == -1 for references, _, _ in pages.values()) == stats["pages"]["cached"]


def test_viewers_are_limited_and_make_room_when_they_leave(server: LiveServer) -> None:
    with ExitStack() as watching:
        for _ in range(16):
            next(watching.enter_context(closing(events(server))))
        assert stream_status(server) == 429
    while stream_status(server) == 429:  # until the server has noticed
        pass


def stream_status(server: LiveServer) -> int:
    with httpx.stream("GET", f"{server.url}/kv/stream", headers={"x-api-key": "root"}, timeout=60) as reply:
        return reply.status_code


def test_the_load_generator_reads_the_pool_and_not_the_sum_of_its_kinds(server: LiveServer) -> None:
    watch = KvWatch(HttpClient(server.url, time.monotonic))

    async def scrape() -> None:
        assert await watch.scrape()
        watch.client.close()

    asyncio.run(scrape())
    summary = get(server, "/kv/summary")
    assert watch.pool_bytes() == summary["bytes"]["allocated"]
    assert (watch.last["block_size"], watch.last["num_gpu_blocks"]) == (4, summary["pages"]["total"])


# ---- the bill of a request


def test_the_bill_comes_on_request_and_is_the_same_streamed_or_not(server: LiveServer) -> None:
    assert "kv_cache" not in complete(server)["usage"]
    page = get(server, "/kv/summary")["groups"][0]["page_bytes"]
    whole = complete(server, kv_usage=True)["usage"]["kv_cache"]
    streamed = streamed_usage(server, kv_usage=True)["kv_cache"]
    tokens = 30 + 8 - 1  # the last token is never computed
    for bill in (whole, streamed):
        assert bill["pages"] == -(-tokens // 4) and bill["peak_bytes"] == bill["pages"] * page
        assert bill["byte_seconds"] > 0 and bill["cached_tokens"] == 28
    assert streamed_usage(server) is None


def test_a_stop_string_does_not_lose_the_bill(server: LiveServer) -> None:
    text = complete(server, max_tokens=40, temperature=0)["choices"][0]["text"]
    reply = complete(server, max_tokens=40, temperature=0, stop=[text[2:4]], kv_usage=True, n=2)
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    bill = reply["usage"]["kv_cache"]
    assert bill["pages"] >= 2 * (30 // 4) and bill["byte_seconds"] > 0
    assert get(server, "/kv/summary")["pages"]["active"] == 0
