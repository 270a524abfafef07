"""Every figure against what the mock server logged as sent, on a clock that both share."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
import pytest

from server.loadtest.api import Api
from server.loadtest.drive import Target
from server.loadtest.http import HttpClient
from server.loadtest.lengths import parse_length
from server.loadtest.mock import serve
from server.loadtest.mock_script import Exchange, Mock, Script
from server.loadtest.run import Load, Server, Settings, run_once
from server.loadtest.slo import parse_slo
from server.loadtest.workload import Filler, Shape, Turn, synthetic
from tests.virtual_time import run


def near(seconds: Any) -> Any:
    """Within 2 % or 1 ms."""
    return pytest.approx(seconds, rel=0.02, abs=0.001)


def settings(**given: Any) -> Settings:
    shape = Shape(parse_length("uniform:20,60"), parse_length("uniform:2,30"))
    base: dict[str, Any] = {"warmup": 0, "quiet": True, "slo": parse_slo("ttft=55ms,tpot=21ms")}
    return Settings(lambda filler, seed: synthetic(shape, filler, seed), sharing=False, **(base | given))


async def measured(script: Script, load: Load, given: Settings) -> tuple[dict[str, Any], list[Exchange]]:
    loop, log = asyncio.get_running_loop(), list[Exchange]()
    listener = await serve(Mock(script, log.append, loop.time), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = HttpClient(url, loop.time)
    result = await run_once(Server("", url, client, Api("completions", "mock"), Filler("words")), load, given)
    client.close()
    listener.close()
    return result, log


def tokens_of(exchange: Exchange) -> int:
    return sum(exchange.chunk_tokens)


def per_request(log: list[Exchange], name: str) -> list[float]:
    match name:
        case "ttft":
            return [e.chunk_times[0] - e.received for e in log]
        case "e2e":
            return [e.chunk_times[-1] - e.received for e in log]
        case "tpot":
            return [(e.chunk_times[-1] - e.chunk_times[0]) / (tokens_of(e) - 1) for e in log if tokens_of(e) > 1]
        case "ntpot":
            return [(e.chunk_times[-1] - e.received) / tokens_of(e) for e in log]
        case "chunk_gap":
            return [b - a for e in log for a, b in zip(e.chunk_times, e.chunk_times[1:], strict=False)]
    assert name == "itl"
    return [
        (e.chunk_times[i] - e.chunk_times[i - 1]) / e.chunk_tokens[i]
        for e in log
        for i in range(1, len(e.chunk_times))
        for _ in range(e.chunk_tokens[i])
    ]


@pytest.mark.parametrize(
    ("script", "load"),
    [
        (Script(jitter=0.3), Load("closed", users=4, requests=40)),
        (Script(per_chunk=3, jitter=0.5), Load("closed", users=3, requests=30)),
        (Script(jitter=0.3, slots=2), Load("open", offsets=array("d", [i * 0.05 for i in range(40)]), rate=20)),
    ],
    ids=["closed", "chunks of three", "open and queued"],
)
def test_figures_agree_with_what_was_sent(script: Script, load: Load) -> None:
    result, log = run(measured(script, load, settings()))
    assert result["requests"] == {
        "sent": len(log), "ok": len(log), "failed": {}, "first_of_each": {}, "missing_done": 0,
    }  # fmt: skip
    for name in ("ttft", "e2e", "tpot", "ntpot", "chunk_gap", "itl"):
        expected, found = per_request(log, name), result["latency"][name]
        assert found["count"] == len(expected), name
        assert found["mean"] == near(np.mean(expected)), name
        for level in (50, 90, 95, 99):
            assert found[f"p{level}"] == near(np.percentile(expected, level)), (name, level)
    seconds = max(e.ended for e in log) - min(e.received for e in log)
    assert result["duration"] == near(seconds)
    assert result["rates"]["output_rate"] == pytest.approx(sum(map(tokens_of, log)) / seconds, rel=0.02)
    assert result["rates"]["input_rate"] == pytest.approx(sum(e.prompt_tokens for e in log) / seconds, rel=0.02)
    assert result["rates"]["request_rate"] == pytest.approx(len(log) / seconds, rel=0.02)
    assert result["tokens"]["counted_by"] == {"usage per chunk": len(log)}


def test_goodput_counts_from_the_log() -> None:
    result, log = run(measured(Script(jitter=0.3), Load("closed", users=4, requests=60), settings()))
    good = sum(
        e.chunk_times[0] - e.received <= 0.055
        and (e.chunk_times[-1] - e.chunk_times[0]) / max(1, tokens_of(e) - 1) <= 0.021
        for e in log
    )
    assert 0 < good < len(log)
    assert result["rates"]["attainment"] == good / len(log)
    assert result["rates"]["goodput"] == pytest.approx(good / result["duration"])


def test_open_loop_waits_for_nobody() -> None:
    """A server of one slot, 0.25 s a request, asked ten times a second: the queue counts."""
    offsets = array("d", [i * 0.1 for i in range(20)])
    fixed = Shape(parse_length("20"), parse_length("11"))
    plan = Settings(lambda filler, seed: synthetic(fixed, filler, seed), sharing=False, warmup=0, quiet=True)
    result, log = run(measured(Script(slots=1), Load("open", offsets=offsets, rate=10), plan))
    received = sorted(e.received for e in log)
    assert [moment - received[0] for moment in received] == pytest.approx(list(offsets), abs=0.001)
    assert result["latency"]["e2e_intended"]["max"] == near(20 * 0.25 - 1.9)


async def lagging() -> tuple[float, float]:
    """One request meant for a moment 0.2 s before it could be sent."""
    loop = asyncio.get_running_loop()
    listener = await serve(Mock(Script(), lambda exchange: None, loop.time), "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", loop.time)
    await asyncio.sleep(0.2)
    record = await Target(client, Api("completions", "mock"), 10).send(Turn("a b", 3), [], loop.time() - 0.2)
    client.close()
    listener.close()
    return record.first - record.intended, record.first - record.sent


def test_a_late_client_shows_from_intended_only() -> None:
    assert run(lagging()) == pytest.approx((0.25, 0.05), abs=0.001)
