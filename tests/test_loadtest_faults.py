"""Servers that fail: each kind is named, counted, and kept out of the successes; nothing hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.loadtest.api import Api
from server.loadtest.drive import Target, closed_loop, open_loop
from server.loadtest.http import HttpClient
from server.loadtest.measure import Figures
from server.loadtest.mock import serve
from server.loadtest.mock_script import Exchange, Mock, Script
from server.loadtest.record import Record
from server.loadtest.workload import Conversation, Turn
from tests.virtual_time import run

NEVER = 10_000


async def against(
    script: Script, requests: int, timeout: float = 5.0, users: int = 2
) -> tuple[list[Record], list[Exchange]]:
    loop, log, records = asyncio.get_running_loop(), list[Exchange](), list[Record]()
    listener = await serve(Mock(script, log.append, loop.time), "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", loop.time)
    work = iter([Conversation((Turn("a few words", 8),))] * NEVER)
    await closed_loop(Target(client, Api("completions", "mock"), timeout), work, users, records.append, requests, None)
    client.close()
    listener.close()
    return records, log


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("http_4xx", "http_4xx"),
        ("http_5xx", "http_5xx"),
        ("stream_error", "stream_error"),
        ("truncated", "truncated"),
        ("reset", "reset"),
        ("non_json", "non_json"),
        ("stall", "timeout"),
        ("empty", "empty"),
        ("not_a_stream", "not_a_stream"),
        ("no_done", ""),
        ("no_usage", ""),
    ],
)
def test_each_fault_has_its_name(fault: str, kind: str) -> None:
    records, _ = run(against(Script(fault=fault), requests=6))
    assert [record.error for record in records] == [kind] * 6
    assert all(record.detail for record in records if kind)


def test_a_fault_in_some_requests_spares_the_others() -> None:
    records, log = run(against(Script(fault="reset", fault_share=0.5), requests=40))
    failed = sum(exchange.fault == "reset" for exchange in log)
    assert 0 < failed < 40
    assert sum(record.error == "reset" for record in records) == failed
    figures = Figures()
    for record in records:
        figures.add(record)
    ttft = figures.summary()["latency"]["ttft"]
    assert ttft["count"] == 40 - failed
    assert ttft["failures_as_infinite"]["p99"] == float("inf")
    assert ttft["p99"] == pytest.approx(0.05, abs=0.001)


def test_a_stalled_stream_ends_at_the_timeout() -> None:
    records, log = run(against(Script(fault="stall"), requests=2, timeout=3.0))
    assert [record.end - record.sent for record in records] == pytest.approx([3.0, 3.0], abs=0.01)
    assert {exchange.fault for exchange in log} == {"client left"}


def test_nobody_listens() -> None:
    async def nowhere() -> Record:
        client = HttpClient("http://127.0.0.1:1", asyncio.get_running_loop().time)
        return await Target(client, Api("completions", "mock"), 5).send(Turn("a", 1), [], 0.0)

    assert run(nowhere()).error == "connect"


def test_connections_are_reused_and_stale_ones_forgiven() -> None:
    async def reused() -> tuple[int, list[Record]]:
        """A server that closes each connection after its reply without saying so."""
        accepted, records, clock = 0, list[Record](), asyncio.get_running_loop().time

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            await reader.readuntil(b"\r\n\r\n")
            body = b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", clock)
        for _ in range(3):
            records.append(await Target(client, Api("completions", "m"), 5).send(Turn("a", 1), [], clock()))
        client.close()
        listener.close()
        return accepted, records

    accepted, records = run(reused())
    assert [record.error for record in records] == ["", "", ""]
    assert accepted == 3


def test_an_open_loop_can_be_stopped_at_once() -> None:
    async def stopped() -> tuple[int, float]:
        loop, records = asyncio.get_running_loop(), list[Record]()
        listener = await serve(Mock(Script(ttft=100.0), lambda exchange: None, loop.time), "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", loop.time)
        target = Target(client, Api("completions", "mock"), 1000)
        work = iter([Conversation((Turn("a", 4),))] * 5)
        await open_loop(target, work, _offsets(0.0, 0.1, 0.2), records.append, 100, stop=lambda: loop.time() > 1.0)
        listener.close()
        return len(records), loop.time()

    recorded, ended = run(stopped())
    assert recorded == 0
    assert ended < 2.0


def test_the_cap_on_streams_is_reported() -> None:
    async def capped() -> int:
        loop = asyncio.get_running_loop()
        listener = await serve(Mock(Script(ttft=1.0), lambda exchange: None, loop.time), "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", loop.time)
        work = iter([Conversation((Turn("a", 2),))] * 5)
        target = Target(client, Api("completions", "mock"), 10)
        held_back = await open_loop(target, work, _offsets(0.0, 0.1, 0.2), lambda record: None, most=2)
        client.close()
        listener.close()
        return held_back

    assert run(capped()) == 1


def _offsets(*seconds: float) -> Any:
    from array import array

    return array("d", seconds)
