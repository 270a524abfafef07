"""More work than fits, over HTTP with a real engine: refusals say when to come back, and every tenant gets its turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import LiveServer, ServerFactory

ENDLESS: dict[str, Any] = {"prompt": "abc", "max_tokens": 15000, "ignore_eos": True}
HOLD_SECONDS = 1.0


KEYS = ("--api-key", "one", "--api-key", "two")


@pytest.fixture
def narrow(server_factory: ServerFactory, tiny_model: Callable[..., Path]) -> Callable[..., LiveServer]:
    """narrow(*flags): one sequence runs, eight wait."""
    flags = ("--max-num-seqs", "1", "--max-queue", "8", "--drain-timeout", "0.5")
    return lambda *more: server_factory(tiny_model("llama", max_position_embeddings=20000), *flags, *more)


def complete(server: LiveServer, tenant: str, **body: Any) -> httpx.Response:
    """A server without keys goes by the salt."""
    headers, body = {"Authorization": f"Bearer {tenant}"}, body | {"cache_salt": tenant}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


def wait_for_sequences(server: LiveServer, running: int, waiting: int) -> None:
    deadline = time.monotonic() + 60
    while (seen := sequences(server)) != (running, waiting):
        assert time.monotonic() < deadline, f"{seen} run and wait"
        time.sleep(0.02)


def sequences(server: LiveServer) -> tuple[int, int]:
    seen = httpx.get(f"{server.url}/kv/summary", headers={"Authorization": "Bearer one"}).json()["requests"]
    return seen["running"], seen["waiting"]


@pytest.mark.parametrize("keys", [KEYS, ()], ids=["by key", "by salt"])
def test_the_one_request_of_a_tenant_does_not_wait_behind_anothers_many(
    narrow: Callable[..., LiveServer], keys: tuple[str, ...]
) -> None:
    """Not even where the others have taken every place."""
    server = narrow(*keys)
    with ThreadPoolExecutor(9) as pool:
        many: list[Future[httpx.Response]] = [pool.submit(complete, server, "one", **ENDLESS | {"timeout": 3})]
        wait_for_sequences(server, 1, 0)
        long = ENDLESS | {"max_tokens": 1200}
        many += [pool.submit(complete, server, "one", **long) for _ in range(8)]
        wait_for_sequences(server, 1, 8)
        assert complete(server, "one", prompt="abc").status_code == 429
        reply = complete(server, "two", prompt="abc", max_tokens=3, ignore_eos=True)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert sum(future.done() for future in many) <= 2, (
            "it waited for more than what ran and one of the other's turn"
        )
        server.process.terminate()


def test_retry_after_follows_from_the_measured_rate(narrow: Callable[..., LiveServer]) -> None:
    """Requests end at most once a second here: room for one takes a second or more, room for eight takes eight."""
    server = narrow()
    for _ in range(4):
        assert complete(server, "one", **ENDLESS | {"timeout": HOLD_SECONDS}).status_code == 200
    with ThreadPoolExecutor(9) as pool:
        held = [pool.submit(complete, server, "one", **ENDLESS) for _ in range(9)]
        wait_for_sequences(server, 1, 8)
        one, eight = (complete(server, "one", prompt="abc", max_tokens=3, n=n) for n in (1, 8))
        assert (one.status_code, eight.status_code) == (429, 429)
        assert (
            one.json()["error"]["code"] == "queue_full" and "9 sequences run or wait" in one.json()["error"]["message"]
        )
        assert 1 <= int(one.headers["retry-after"]) < int(eight.headers["retry-after"]) <= 60
        assert int(eight.headers["retry-after"]) >= 6 * HOLD_SECONDS
        server.process.terminate()
        assert {future.result().status_code for future in held} <= {503}


NEVER_FITS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": ["abc"] * 10}),
    ("completions", {"prompt": ["abc"] * 5, "n": 2, "stream": True}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 10}),
    ("embeddings", {"input": ["abc"] * 10}),
]


def test_a_request_that_is_larger_than_all_places_is_not_told_to_come_back(narrow: Callable[..., LiveServer]) -> None:
    server = narrow()
    for path, body in NEVER_FITS:
        refused = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        message = refused.json()["error"]["message"]
        assert "10 sequences" in message and "at most 9" in message
    fits = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["abc"] * 9}, timeout=60)
    assert len(fits.json()["data"]) == 9
