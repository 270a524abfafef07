"""What EngineClient holds for others has a bound: rows nobody reads, prompts of readers who have left."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from server.client import EngineClient, StreamCutError
from server.engine.messages import Row
from server.places import QueueFullError
from server.stream import drop
from tests.test_client import aborted, read, submit, with_client


@pytest.mark.fault
def test_a_taker_that_stays_busy_is_cut() -> None:
    """Once it is not, it gets what had come, in one list, and then the error."""

    async def test(client: EngineClient) -> None:
        busy = asyncio.get_running_loop().create_future()
        taken: list[list[Row]] = []

        def take(rows: list[Row]) -> asyncio.Future[None] | None:
            taken.append(rows)
            return busy if len(taken) == 1 else None

        async with client.stream([submit("slow", [1], max_tokens=10**9)], take) as stream:
            while (await aborted(client)).get("slow") is None:
                pass
            assert stream.unread == 4097
            busy.set_result(None)
            with pytest.raises(StreamCutError, match="slow_reader"):
                await stream.wait()
        assert len(taken) == 2 and len(taken[1]) == 4097

    with_client(test)


@pytest.mark.fault
def test_who_comes_and_goes_while_the_engine_does_not_read_fills_no_memory() -> None:
    """Their prompts wait in this process until it does: no more of them than may wait in the queue."""

    async def test(client: EngineClient) -> None:
        assert client.info is not None
        come = 0
        os.kill(client.info.pid, signal.SIGSTOP)
        try:
            with pytest.raises(QueueFullError):
                for come in range(10 * client.limit):
                    async with client.stream([submit(f"r{come}", [1] * 30_000)], drop):
                        pass
        finally:
            os.kill(client.info.pid, signal.SIGCONT)
        assert client.limit <= come <= client.limit + 2  # what the pipe itself holds is not counted
        await client.query("state")
        assert len(await read(client, submit("later", [1, 2]))) == 5

    with_client(test, max_queue=20)
