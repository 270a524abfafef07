"""EngineClient against a scripted engine over the real pipe: streams, aborts, deadlines, limits and deaths."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.client import EngineClient, EngineDeadError, StreamCutError
from server.engine.facts import EngineConfig
from server.engine.messages import Row, SamplingParams, StepOutput, Submit
from server.places import QueueFullError
from server.stream import Stream, drop
from tests import scripted_engine
from tests.scripted_engine import CRASH, KILL, SILENT


def submit(id: str, tokens: list[int], max_tokens: int = 5, **params: Any) -> Submit:
    return Submit(id, Submit.pack(tokens), SamplingParams(max_tokens=max_tokens, **params))


@asynccontextmanager
async def running_client(**config: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig(**({"model": "scripted"} | config)), scripted_engine.run)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def with_client(test: Callable[[EngineClient], Awaitable[None]], **config: Any) -> None:
    async def body() -> None:
        async with running_client(**config) as client:
            await test(client)

    asyncio.run(body())


async def read(client: EngineClient, *submits: Submit, **limits: float) -> list[Row]:
    read: list[Row] = []
    async with client.stream(submits, read.extend, **limits) as stream:
        await stream.wait()
    return read


class Inbox:
    """A taker whose rows somebody waits for."""

    def __init__(self) -> None:
        self._rows: asyncio.Queue[list[Row]] = asyncio.Queue()
        self.take = self._rows.put_nowait
        self.next = self._rows.get


async def aborted(client: EngineClient) -> dict[str, str]:
    """What the engine was told to end: a query goes after the abort on the same pipe."""
    return dict((await client.query("state"))["aborted"])


def test_start_tells_the_facts_and_sets_openmp_before_the_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT")  # the suite's own

    async def test(client: EngineClient) -> None:
        assert client.info is not None and client.info.vocab_size == scripted_engine.VOCAB_SIZE
        assert client.info.pid != os.getpid()
        assert (await client.query("state"))["spin"] == "4000"

    with_client(test)


def test_rows_of_one_request_come_in_order_and_end() -> None:
    async def test(client: EngineClient) -> None:
        rows = await read(client, submit("a", [7, 8, 9], max_tokens=4))
        assert [row.tokens for row in rows] == [(7,), (8,), (9,), (7,)]
        assert [row.finish for row in rows] == [None, None, None, "length"]
        assert client.open_sequences == 0

    with_client(test)


def test_many_requests_and_choices_do_not_mix() -> None:
    async def test(client: EngineClient) -> None:
        asked = [submit(f"r{i}", [i, i + 1], max_tokens=6, n=1 + i % 3) for i in range(30)]
        replies = await asyncio.gather(*(read(client, item) for item in asked))
        for item, rows in zip(asked, replies, strict=True):
            for choice in range(item.params.n):
                tokens = [token for row in rows if row.choice == choice for token in row.tokens]
                assert tokens == item.token_ids() * 3

    with_client(test, max_queue=100)


@pytest.mark.fault
def test_leaving_early_aborts_in_the_engine() -> None:
    async def test(client: EngineClient) -> None:
        inbox = Inbox()
        async with client.stream([submit("gone", [1], max_tokens=10**9)], inbox.take):
            await inbox.next()
        assert await aborted(client) == {"gone": "client"}
        assert (await client.query("state"))["running"] == []

    with_client(test)


@pytest.mark.fault
def test_cancelling_the_reader_aborts_in_the_engine() -> None:
    async def test(client: EngineClient) -> None:
        reader = asyncio.create_task(read(client, submit("gone", [1], seed=SILENT)))
        while (await client.query("state"))["running"] != ["gone"]:
            pass
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert await aborted(client) == {"gone": "client"}

    with_client(test)


def test_finish_ends_the_rest_because_of_a_stop_string() -> None:
    async def test(client: EngineClient) -> None:
        inbox = Inbox()
        async with client.stream([submit("done", [1], max_tokens=10**9)], inbox.take) as stream:
            await inbox.next()
            client.finish(stream)
            await stream.wait()
        assert await aborted(client) == {"done": "stop_string"}

    with_client(test)


@pytest.mark.parametrize("limit", ["timeout", "queue_timeout"])
@pytest.mark.fault
def test_a_deadline_cuts_a_silent_request(limit: str) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(StreamCutError) as cut:
            await read(client, submit("late", [1], seed=SILENT), **{limit: 0.05})
        assert cut.value.reason == limit
        assert await aborted(client) == {"late": limit}

    with_client(test)


def test_a_cut_stream_is_not_left_to_the_garbage_collector() -> None:
    """A full collection may be thousands of requests away, and a stream holds its prompt."""

    async def test(client: EngineClient) -> None:
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(StreamCutError):
                await read(client, submit("late", [1], seed=SILENT), timeout=0.01)
            assert not any(type(thing) is Stream for thing in gc.get_objects())
        finally:
            gc.enable()

    with_client(test)


def test_queue_timeout_is_over_once_its_turn_has_come() -> None:
    """Long before the first row, where the prompt is long."""

    async def test(client: EngineClient) -> None:
        inbox = Inbox()
        await client.query("hold")
        async with client.stream([submit("a", [1], max_tokens=10**9)], inbox.take, queue_timeout=2) as stream:
            await client.query("running")  # answered behind what the engine says of the turn
            assert stream.started
            await asyncio.sleep(2.1)
            await client.query("go")
            assert await inbox.next()

    with_client(test)


@pytest.mark.fault
@pytest.mark.parametrize("where", ["taking", "busy"])
def test_a_taker_that_fails_ends_its_own_stream_alone(where: str) -> None:
    """Whether it raises or what it waits for does; a neighbour goes on, and the engine is told."""

    async def test(client: EngineClient) -> None:
        failure = ValueError("cannot take that")
        busy = asyncio.get_running_loop().create_future()

        def take(rows: list[Row]) -> asyncio.Future[None]:
            if where == "taking":
                raise failure
            if not busy.done():
                busy.set_exception(failure)
            return busy

        async with client.stream([submit("fails", [1], max_tokens=10**9)], take) as stream:
            neighbour = asyncio.create_task(read(client, submit("goes on", [1, 2], max_tokens=50)))
            with pytest.raises(ValueError, match="cannot take"):
                await stream.wait()
        assert len(await neighbour) == 50
        assert await aborted(client) == {"fails": "client"}

    with_client(test)


@pytest.mark.fault
def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def test(client: EngineClient) -> None:
        async with client.stream([submit("a", [1], seed=SILENT), submit("b", [1], seed=SILENT)], drop):
            with pytest.raises(
                QueueFullError, match="2 sequences run or wait, of at most 3, 2 of them yours; 2 more"
            ) as full:
                await read(client, submit("c", [1], n=2))
            assert 1 <= full.value.retry_after <= 60
            assert len(await read(client, submit("d", [1]))) == 5
        assert len(await read(client, submit("c", [1], n=2))) == 10

    with_client(test, max_num_seqs=1, max_queue=2)


@pytest.mark.fault
def test_a_listener_that_fails_is_told_of_and_costs_no_row() -> None:
    async def test(client: EngineClient) -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context.get("exception")))
        failure = ValueError("cannot count that")

        def fail(output: StepOutput) -> None:
            raise failure

        client.on_step = fail
        assert len(await read(client, submit("a", [1]))) == 5
        assert len(await read(client, submit("b", [1]))) == 5
        assert client.failure is None and told and set(told) == {failure}

    with_client(test)


@pytest.mark.fault
def test_an_engine_that_answers_and_dies_in_the_same_breath_is_dead() -> None:
    async def test(client: EngineClient) -> None:
        deaths: list[str] = []
        client.on_death = deaths.append
        asked = asyncio.create_task(client.query("state"))
        fatal = asyncio.create_task(read(client, submit("fatal", [1], seed=CRASH, max_tokens=10)))
        await asyncio.sleep(0)  # both are sent; what comes of it is read at once
        for child in multiprocessing.active_children():
            child.join(20)
        assert await asked
        with pytest.raises(EngineDeadError, match="told to crash"):
            await fatal
        assert len(deaths) == 1

    with_client(test)


def test_query_errors_are_told() -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(ValueError, match="no such view"):
            await client.query("unknown")

    with_client(test)


@pytest.mark.parametrize(("seed", "text"), [(KILL, "exit code 9"), (CRASH, "told to crash")])
@pytest.mark.fault
def test_a_death_ends_every_stream_and_is_told_once(seed: int, text: str) -> None:
    async def test(client: EngineClient) -> None:
        deaths: list[str] = []
        client.on_death = deaths.append
        waiting = asyncio.create_task(read(client, submit("other", [1], seed=SILENT)))
        with pytest.raises(EngineDeadError, match=text):
            await read(client, submit("fatal", [1], seed=seed, max_tokens=10))
        with pytest.raises(EngineDeadError, match=text):
            await waiting
        with pytest.raises(EngineDeadError, match=text):
            await read(client, submit("after", [1]))
        with pytest.raises(EngineDeadError, match=text):
            await client.query("state")
        assert len(deaths) == 1

    with_client(test)


@pytest.mark.fault
def test_what_a_dying_engine_said_is_read_even_after_a_write_to_it_failed() -> None:
    async def test(client: EngineClient) -> None:
        fatal = asyncio.create_task(read(client, submit("fatal", [1], seed=CRASH, max_tokens=10)))
        await asyncio.sleep(0)  # the task has sent; nothing is read while this test holds the loop
        for child in multiprocessing.active_children():
            child.join(20)
        late = asyncio.create_task(read(client, submit("late", [1])))  # writes before the loop reads again
        for attempt in (fatal, late):
            with pytest.raises(EngineDeadError, match="told to crash"):
                await attempt

    with_client(test)


@pytest.mark.parametrize(("model", "text"), [("die", "exit code 7"), ("crash", "no such checkpoint")])
def test_a_failed_start_carries_the_engines_line(model: str, text: str) -> None:
    async def body() -> None:
        client = EngineClient(EngineConfig(model=model), scripted_engine.run)
        with pytest.raises(EngineDeadError, match=text):
            await client.start()
        await client.close()

    asyncio.run(body())


def test_stalled_means_open_work_and_silence() -> None:
    async def test(client: EngineClient) -> None:
        assert not client.is_stalled(0)
        async with client.stream([submit("a", [1], seed=SILENT)], drop):
            await asyncio.sleep(0.01)
            assert client.is_stalled(0.005)
            assert not client.is_stalled(60)

    with_client(test)
