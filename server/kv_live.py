"""The KV cache as it is now, for /kv: questions to the engine, asked once for all who ask, and the stream of changes.

Knows no routes and no keys. The engine adds page changes to its step messages and answers queries between steps;
everything else (folding, comparing, fanning out) happens here, in the HTTP process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from server.caller import Caller
from server.client import EngineClient, EngineDeadError
from server.engine.facts import EngineInfo
from server.engine.messages import StepOutput
from server.errors import ApiError
from server.events import dumps
from server.kv_map import RUN_FIELDS, PageMap
from server.kv_views import View, requests, stats_view, summary

FRESH_SECONDS = 0.1
"""An answer of the engine serves everybody who asks within this time."""
ANSWER_SECONDS = 30.0
TICK_SECONDS = 0.1
IDLE_SECONDS = 1.0
"""While nothing happens: a delta without pages, which is the heartbeat."""
ROWS_SECONDS = 1.0
MAX_VIEWERS = 16
MAX_UNREAD = 16
"""Events that wait for a viewer; then they are dropped, and a snapshot takes their place."""


class SharedQuery:
    """One question to the engine, however many ask it at once."""

    def __init__(self, client: EngineClient, kind: str) -> None:
        self._client, self._kind = client, kind
        self._answer: asyncio.Task[View] | None = None
        self._answered_at = 0.0

    async def ask(self) -> View:
        """The engine's books, at most FRESH_SECONDS old. ApiError if it is gone, or busy for too long with a step."""
        if self._answer is None or (self._answer.done() and time.monotonic() - self._answered_at > FRESH_SECONDS):
            self._answer = asyncio.create_task(self._query())
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.shield(self._answer)
        except EngineDeadError as dead:
            raise ApiError(503, f"the engine is gone: {dead}", code="engine_dead") from None
        except TimeoutError:
            busy = f"the engine has been busy with one step for {ANSWER_SECONDS:g} s"
            raise ApiError(503, busy, code="engine_busy", headers={"Retry-After": "5"}) from None

    async def _query(self) -> View:
        try:
            books: View = await self._client.query(self._kind)
            return books
        finally:
            self._answered_at = time.monotonic()


@dataclass(eq=False, slots=True)
class Viewer:
    """One reader of the stream."""

    caller: Caller
    events: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(MAX_UNREAD))
    needs_snapshot: bool = True

    def offer(self, event: str | None) -> None:
        """Call make_room first."""
        self.events.put_nowait(event)

    def make_room(self) -> None:
        """Drop everything unread if no more may wait: the next thing to read must then be a snapshot."""
        if self.events.full():
            while not self.events.empty():
                self.events.get_nowait()
            self.needs_snapshot = True


class KvLive:
    """is_over: the server is going away, and streams end."""

    def __init__(self, client: EngineClient, info: EngineInfo, is_over: Callable[[], bool]) -> None:
        self._client, self._info, self._is_over = client, info, is_over
        self._map = PageMap(info.num_pages)
        self._summary, self._requests = SharedQuery(client, "kv_summary"), SharedQuery(client, "kv_requests")
        self._viewers: set[Viewer] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._serial = 0

    def observe(self, output: StepOutput) -> None:
        """Fold what a step changed."""
        self._map.apply(output.kv_delta, int(time.time()))

    async def summary(self) -> View:
        return summary(await self._summary.ask(), self._info)

    async def requests(self, caller: Caller) -> View:
        return requests(await self._requests.ask(), caller)

    def pages(self, caller: Caller) -> View:
        """The whole map."""
        facts = {"page_size": self._info.page_size, "page_bytes": self._info.page_bytes, "run_fields": RUN_FIELDS}
        return facts | self._map.show(self._map.everything(), caller)

    # ---- the stream

    async def watch(self, caller: Caller) -> AsyncIterator[str]:
        """Events, a snapshot first; ApiError 429 when MAX_VIEWERS are here."""
        if self._is_over():
            raise ApiError(503, "the server is shutting down")
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(429, f"{MAX_VIEWERS} viewers watch already", headers={"Retry-After": "30"})
        viewer = Viewer(caller)
        self._viewers.add(viewer)
        self._send(viewer, {})
        if not self._loops:
            self._loops = [asyncio.create_task(loop()) for loop in (self._tick_forever, self._rows_forever)]
        try:
            while (event := await viewer.events.get()) is not None:
                yield event
        finally:
            self._leave(viewer)

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            for loop in self._loops:
                loop.cancel()
            self._loops = []

    async def _tick_forever(self) -> None:
        """At most ten deltas a second; every IDLE_SECONDS one even if nothing happens."""
        seen, sent_at = self._client.stats, time.monotonic()
        while not self._is_over():
            await asyncio.sleep(TICK_SECONDS)
            if self._client.stats is not seen or time.monotonic() - sent_at >= IDLE_SECONDS:
                seen, sent_at = self._client.stats, time.monotonic()
                self._tick()
        for viewer in self._viewers:
            viewer.make_room()
            viewer.offer(None)

    def _tick(self) -> None:
        self._serial += 1
        cells = self._map.take_changed()
        made: dict[Caller, View] = {}
        for viewer in self._viewers:
            viewer.make_room()
            if not viewer.needs_snapshot and viewer.caller not in made:
                made[viewer.caller] = self._map.show(cells, viewer.caller)
            self._send(viewer, made.get(viewer.caller, {}))

    def _send(self, viewer: Viewer, delta: View) -> None:
        stats = {"time_ms": time.time_ns() // 1_000_000, "stats": stats_view(self._client.stats, time.monotonic_ns())}
        if viewer.needs_snapshot:
            viewer.needs_snapshot = False
            viewer.offer(self._event("snapshot", self.pages(viewer.caller) | stats))
        else:
            viewer.offer(self._event("delta", delta | stats))

    async def _rows_forever(self) -> None:
        """The table of requests, once a second while there are steps."""
        seen = None
        while True:
            if self._client.stats is not seen:
                seen = self._client.stats
                await self._send_rows()
            await asyncio.sleep(ROWS_SECONDS)

    async def _send_rows(self) -> None:
        try:
            books = await self._requests.ask()
        except ApiError:
            return  # the engine is busy or gone: the stream ends by itself, or the next second has an answer
        for viewer in self._viewers:
            if not viewer.events.full():
                viewer.offer(self._event("requests", requests(books, viewer.caller)))

    def _event(self, kind: str, data: dict[str, Any]) -> str:
        return f"id: {self._serial}\nevent: {kind}\ndata: {dumps(data)}\n\n"
