"""`python -m server.loadtest.lateness URL`: how late a server's event loop is while it tokenises a long prompt.

Streams run and one long prompt after another arrives; the server's own histogram tells the lateness. Knows HTTP only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator

import httpx

METRIC = "ropeway_event_loop_lateness_seconds_bucket{"
WORD = " hello"


async def buckets(client: httpx.AsyncClient) -> dict[float, float]:
    """Upper bound in seconds -> looks at or below it, since the server's start."""
    text = (await client.get("/metrics")).raise_for_status().text
    found = {}
    for line in text.splitlines():
        if line.startswith(METRIC):
            bound = line.split('le="')[1].split('"')[0]
            found[float(bound.replace("+Inf", "inf"))] = float(line.rsplit(" ", 1)[1])
    return found


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper bound of the bucket that holds this share of the looks between the two readings."""
    counts = {bound: after[bound] - before.get(bound, 0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next(bound for bound, count in counts.items() if count >= share * total)


async def stream(client: httpx.AsyncClient) -> None:
    """One endless stream, read as fast as it comes."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                pass


@contextlib.asynccontextmanager
async def running_streams(client: httpx.AsyncClient, count: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(stream(client)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, streams: int, words: int, rounds: int, key: str | None) -> dict[str, float]:
    """The long prompt is refused where it does not fit the context: tokenised it is in any case."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": WORD * words, "max_tokens": 1}
    limits = httpx.Limits(max_connections=streams + 4)
    client = httpx.AsyncClient(base_url=url, timeout=600, headers=headers, limits=limits)
    async with client, running_streams(client, streams):
        await asyncio.sleep(2)  # until all of them stream
        quiet = await buckets(client)
        await asyncio.sleep(2)
        before = await buckets(client)
        for _ in range(rounds):
            await client.post("/v1/completions", json=body)
        after = await buckets(client)
    return {
        "streams": streams,
        "prompt_tokens": words,
        "p99_ms_streams_alone": quantile(quiet, before, 0.99) * 1000,
        "p50_ms": quantile(before, after, 0.5) * 1000,
        "p99_ms": quantile(before, after, 0.99) * 1000,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.loadtest.lateness", description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--words", type=int, default=100_000, help="words of the long prompt, a token each")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--api-key")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.url, given.streams, given.words, given.rounds, given.api_key))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
