"""What the page costs. `python -m tests.bench_ui`: scripting time of an update at 10,000 pages and 200 requests.

`python -m tests.bench_ui viewers URL`: tokens per second of a running server with and without four viewers, in turns.
Prints figures and judges nothing: benchmarks are commands, not tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Page
from starlette.responses import Response

from server.caller import Caller
from server.disconnect import EventStream, relayed
from server.events import dumps
from server.kv_map import RUN_FIELDS, PageMap
from server.routes import ui
from tests.browser import chromium, visit
from tests.conftest import free_port

PAGES, REQUESTS, PAGES_EACH = 10_000, 200, 45
UPDATES = 300
PAGE_BYTES = 368_640
VIEWERS = 4


class SyntheticPool:
    """200 requests that share a prefix, grow, end and are followed by new ones, on the server's own page map."""

    def __init__(self) -> None:
        self.map = PageMap([PAGES + 1])
        self.random = random.Random(0)
        self.free = list(range(PAGES, 0, -1))
        self.held: dict[str, list[int]] = {}
        self.serial = 0
        while len(self.held) < REQUESTS:
            self.start(self.random.randrange(10, PAGES_EACH))

    def start(self, count: int) -> None:
        self.serial += 1
        name = f"req-{self.serial:06d}"
        self.held[name] = []
        for _ in range(count):
            self.grow(name)

    def grow(self, name: str) -> None:
        page = self.free.pop()
        self.held[name].append(page)
        self.map.apply([(0, page, "new", name, "")], now_ms())
        if len(self.held[name]) == 1:
            for other in list(self.held)[:3]:
                self.share(page, other)

    def share(self, page: int, name: str) -> None:
        if page not in self.held[name]:
            self.held[name].append(page)
            self.map.apply([(0, page, "found", name, "")], now_ms())

    def end(self, name: str) -> None:
        for page in self.held.pop(name):
            is_last = not any(page in pages for pages in self.held.values())
            self.map.apply([(0, page, "kept" if is_last else "left", name, "")], now_ms())
            if is_last:
                self.free.insert(0, page)

    def step(self) -> None:
        """A tenth of a second under load: one token in sixteen begins a page; two requests end, two begin."""
        for name in self.random.sample(sorted(self.held), 60):
            self.grow(name)
        for name in sorted(self.held, key=lambda name: -len(self.held[name]))[:2]:
            self.end(name)
            self.start(20)

    def stats(self) -> dict[str, Any]:
        active = PAGES - len(self.free)
        return {
            "running": len(self.held),
            "waiting": 3,
            "pages": {"active": active, "cached": 0, "free": PAGES - active},
            "bytes": {"active": active * PAGE_BYTES, "cached": 0, "written": 0},
            "prompt_tokens": self.serial * 100,
            "generation_tokens": self.serial * 50,
        }

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(name, len(pages)) for name, pages in self.held.items()]

    def row(self, name: str, pages: int) -> dict[str, Any]:
        held = pages * PAGE_BYTES
        fixed = {"id": name, "choice": 0, "state": "running", "age_s": 3.0, "cached_tokens": 16, "prompt_tokens": 320}
        bill = {"peak_bytes": held, "share_weighted_bytes": held, "byte_seconds": held * 3.0}
        return fixed | bill | {"output_tokens": pages * 16 - 320, "pages": pages, "bytes": held}

    async def events(self, updates: int) -> AsyncIterator[str]:
        """A snapshot and the rows, so many updates at ten a second, then silence."""
        everything = self.map.show(self.map.everything(), Caller())
        facts = {"page_size": 16, "page_bytes": [PAGE_BYTES], "run_fields": RUN_FIELDS}
        yield self.event("snapshot", facts | everything)
        for tick in range(updates):
            if tick % 10 == 0:
                yield f"event: requests\ndata: {dumps({'requests': self.rows()})}\n\n"
            await asyncio.sleep(0.1)
            self.step()
            yield self.event("delta", self.map.show(self.map.take_changed(), Caller()))
        yield f"event: requests\ndata: {dumps({'requests': self.rows()})}\n\n"
        await asyncio.sleep(3600)

    def event(self, kind: str, data: dict[str, Any]) -> str:
        return f"event: {kind}\ndata: {dumps(data | {'time_ms': now_ms(), 'stats': self.stats()})}\n\n"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def synthetic_app(updates: int) -> FastAPI:
    app = FastAPI()
    app.include_router(ui.router)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "synthetic", "max_model_len": 4096}]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("")

    @app.get("/kv/stream")
    async def stream() -> Response:
        return EventStream(relayed(SyntheticPool().events(updates)), 60)

    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


LISTEN = """() => { window.costs = [];
  document.addEventListener("ropeway:update", (event) => window.costs.push(event.detail)); }"""


def measure_updates(screenshot: str | None) -> None:
    with serving(synthetic_app(UPDATES + 50)) as url, chromium() as browser, visit(browser, url) as guest:
        page = guest.open_live().page
        page.evaluate(LISTEN)
        while page.evaluate("window.costs.length") < UPDATES:
            page.wait_for_timeout(500)
        report_costs(page)
        if screenshot is not None:
            page.screenshot(path=screenshot)


def report_costs(page: Page) -> None:
    costs: list[float] = page.evaluate("window.costs")
    twentieths = statistics.quantiles(costs, n=20)
    print(
        f"update at {PAGES} pages, {REQUESTS} requests ({len(costs)} updates): "
        f"p50 {twentieths[9]:.2f} ms, p95 {twentieths[18]:.2f} ms, max {max(costs):.2f} ms (budget: p95 8 ms)"
    )


def measure_viewers(url: str, seconds: float, rounds: int, pid: int | None) -> None:
    """Rounds without and with viewers take turns, so that what else the machine does falls on both."""
    if httpx.get(f"{url}/readyz").status_code != 200:
        raise SystemExit(f"{url} is not ready")
    loads: dict[int, list[float]] = {0: [], VIEWERS: []}
    speeds: dict[int, list[float]] = {0: [], VIEWERS: []}
    for turn in range(2 * rounds):
        viewers = 0 if turn % 2 == 0 else VIEWERS
        start, used = time.monotonic(), cpu_seconds(pid)
        speeds[viewers].append(asyncio.run(speed_of(url, viewers, seconds)))
        loads[viewers].append((cpu_seconds(pid) - used) / (time.monotonic() - start))
        print(f"round {turn // 2 + 1}, {viewers} viewers: {speeds[viewers][-1]:.1f} tok/s", flush=True)
    if pid is not None:
        alone, watched = (100 * statistics.median(loads[viewers]) for viewers in (0, VIEWERS))
        print(f"HTTP process: {alone:.2f} % of a core alone, {watched:.2f} % with {VIEWERS} viewers")
    without, with_them = (statistics.median(speeds[viewers]) for viewers in (0, VIEWERS))
    ratios = [with_it / alone for alone, with_it in zip(speeds[0], speeds[VIEWERS], strict=True)]
    print(
        f"median {without:.1f} tok/s alone, {with_them:.1f} with {VIEWERS} viewers; "
        f"cost of a pair: median {100 * (1 - statistics.median(ratios)):+.2f} %, "
        f"from {100 * (1 - max(ratios)):+.2f} to {100 * (1 - min(ratios)):+.2f} % (budget: 1 %)"
    )


def cpu_seconds(pid: int | None) -> float:
    """Spent so far by that process alone: unlike tokens per second, other processes hardly touch it."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def speed_of(url: str, viewers: int, seconds: float) -> float:
    """Tokens per second over `seconds` while eight streams generate, by the server's own counter."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        watching = [asyncio.create_task(watch(client)) for _ in range(viewers)]
        working = [asyncio.create_task(generate(client)) for _ in range(8)]
        await asyncio.sleep(2)
        before, start = await tokens_of(client), time.monotonic()
        await asyncio.sleep(seconds)
        speed = (await tokens_of(client) - before) / (time.monotonic() - start)
        for task in watching + working:
            task.cancel()
        await asyncio.gather(*watching, *working, return_exceptions=True)
    return speed


async def watch(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/kv/stream") as reply:
        async for _ in reply.aiter_raw():
            pass


async def generate(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_raw():
                pass


async def tokens_of(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    line = next(line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))
    return float(line.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("updates", "viewers"), default="updates")
    parser.add_argument("url", nargs="?", help="viewers: a running server without an API key")
    parser.add_argument("--seconds", type=float, default=10, help="viewers: of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="viewers: pairs of measurements")
    parser.add_argument("--screenshot", help="updates: where to keep a picture of the full map")
    parser.add_argument("--pid", type=int, help="viewers: the `ropeway serve` process, to measure its CPU time too")
    options = parser.parse_args()
    if options.what == "updates":
        measure_updates(options.screenshot)
    elif options.url is None:
        parser.error("viewers needs the URL of a running server")
    else:
        measure_viewers(options.url, options.seconds, options.rounds, options.pid)


if __name__ == "__main__":
    main()
