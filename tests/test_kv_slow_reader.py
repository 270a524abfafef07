"""/kv/stream to a reader that stops reading: what waits for it is bounded, others notice nothing, and it catches up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from server import kv_live
from server.caller import Caller
from server.disconnect import EventStream, relayed
from server.engine.facts import EngineStats
from server.engine.messages import StepOutput
from server.engine.views import kv_requests
from server.kv_live import MAX_UNREAD, KvLive
from tests.fake_device import Rig, rig
from tests.test_kv_api import states

PAGES = 64
ROOT = Caller()
Event = tuple[int, str, dict[str, Any]]


@dataclass
class Running:
    """What KvLive asks of the engine's client, answered by a real engine in this process."""

    rig: Rig
    output: StepOutput = field(default_factory=lambda: StepOutput((), EngineStats()))
    serial: int = 0

    @property
    def stats(self) -> Any:
        return self.output.stats

    async def query(self, kind: str) -> Any:
        assert kind == "kv_requests"
        return kv_requests(self.rig.engine)

    def step(self, live: KvLive) -> None:
        """One step of an engine that never runs out of work, and whose pages go from hand to hand."""
        while len(self.rig.engine.request_ids()) < 6:
            self.serial += 1
            self.rig.submit(f"r{self.serial}", [self.serial % 50] * (3 + self.serial % 9), max_tokens=9)
        self.output = self.rig.step()
        live.observe(self.output)


class Connection:
    """The ASGI side of one viewer: a body write goes through while the gate is open."""

    def __init__(self, live: KvLive, write_timeout: float = 60) -> None:
        self.events: list[Event] = []
        self.gate, self.written, self.was_left = asyncio.Event(), asyncio.Event(), True
        self.gate.set()
        stream = EventStream(relayed(live.watch(ROOT)), write_timeout)
        self.task = asyncio.create_task(stream({"type": "http"}, self.receive, self.send))

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.gate.wait()
            self.was_left = message.get("more_body", False)
        if text := message.get("body", b"").decode().removesuffix("data: [DONE]\n\n"):
            number, kind, data = (line.partition(": ")[2] for line in text.strip().split("\n"))
            self.events.append((int(number), kind, json.loads(data)))
            self.written.set()

    async def following(self, count: int) -> AsyncIterator[Event]:
        """The next events as they are written."""
        at = len(self.events)
        for index in range(at, at + count):
            while len(self.events) <= index:
                self.written.clear()
                await self.written.wait()
            yield self.events[index]


@pytest.fixture(autouse=True, params=[0.003, 1000], ids=["deltas and requests", "deltas"])
def fast_ticks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What finds no room may be a delta or a table of requests."""
    monkeypatch.setattr(kv_live, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(kv_live, "ROWS_SECONDS", request.param)


def start(over: list[bool]) -> tuple[Running, KvLive]:
    running = Running(rig(pages=PAGES))
    info = replace(running.rig.engine.info, num_pages=(PAGES + 1,))
    return running, KvLive(running, info, lambda: bool(over))  # type: ignore[arg-type]


def fold(events: list[Event]) -> dict[int, list[Any]]:
    """The map that a reader has: a snapshot replaces it, a delta must follow what came before it without a gap."""
    pages: dict[int, list[Any]] = {}
    last = 0
    for number, kind, data in events:
        if kind == "snapshot":
            pages = states(data, {})
        elif kind == "delta":
            assert number == last + 1, f"delta {number} follows event {last}"
            pages = states(data, pages)
        last = number if kind != "requests" else last
    return pages


def test_a_reader_that_stops_misses_events_and_recovers_with_a_snapshot() -> None:
    async def scenario() -> None:
        over: list[bool] = []
        running, live = start(over)
        slow, fast = Connection(live), Connection(live)
        async for _ in slow.following(5):
            running.step(live)
        slow.gate.clear()
        async for _ in fast.following(6 * MAX_UNREAD):
            running.step(live)
        before = len(slow.events)
        slow.gate.set()
        async for number, _, _ in slow.following(3 * MAX_UNREAD):
            running.step(live)
            if number > fast.events[-1][0]:
                break
        over.append(True)
        await asyncio.gather(slow.task, fast.task)
        assert fold(slow.events) == fold(fast.events) == states(live.pages(ROOT), {})
        kinds = [kind for _, kind, _ in slow.events[before:]]
        assert "snapshot" in kinds[: MAX_UNREAD + 2] and "snapshot" not in [kind for _, kind, _ in fast.events[1:]]

    asyncio.run(scenario())


def test_what_waits_for_a_reader_is_bounded() -> None:
    """However long it does not read, it then gets one event that was being written and MAX_UNREAD that waited."""

    async def scenario() -> None:
        over: list[bool] = []
        running, live = start(over)
        slow, fast = Connection(live), Connection(live)
        slow.gate.clear()
        async for _ in fast.following(10 * MAX_UNREAD):
            running.step(live)
        over.append(True)
        await fast.task
        slow.gate.set()
        await slow.task
        assert len(slow.events) <= 1 + MAX_UNREAD

    asyncio.run(scenario())


def test_a_reader_that_never_reads_is_let_go_and_makes_room() -> None:
    async def scenario() -> None:
        over: list[bool] = []
        live = start(over)[1]
        stuck = [Connection(live, write_timeout=0.05) for _ in range(kv_live.MAX_VIEWERS)]
        for connection in stuck:
            connection.gate.clear()
        await asyncio.gather(*(connection.task for connection in stuck))
        assert all(connection.was_left for connection in stuck)
        again = Connection(live)
        async for _, kind, _ in again.following(1):
            assert kind == "snapshot"
        over.append(True)
        await again.task
        assert not again.was_left

    asyncio.run(scenario())
