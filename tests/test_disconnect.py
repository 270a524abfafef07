"""Event streams on the ASGI side: what is sent within the call that writes it, and a client that takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from server.disconnect import EventStream, Writer, relayed
from server.errors import ApiError
from server.stream import SlowReaderError


class Client:
    """A connection that takes messages while its gate is open, and closes at its end."""

    def __init__(self) -> None:
        self.gate, self.gone = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.taken: list[Any] = []

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.taken.append(message)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.taken).decode()

    @property
    def is_complete(self) -> bool:
        return bool(self.taken[-1] == {"type": "http.response.body", "body": b""})


def streamed(work: Callable[[Client, Writer], Awaitable[None]], seconds: float = 60) -> Client:
    """What a client has got once `work` has written all it wants to."""

    async def scenario() -> Client:
        client = Client()
        stream = EventStream(lambda write: work(client, write), seconds, lambda error: error.message, end="!")
        await stream({"type": "http"}, client.receive, client.send)
        return client

    return asyncio.run(scenario())


def test_what_goes_through_is_sent_within_the_call() -> None:
    async def work(client: Client, write: Writer) -> None:
        for count, part in enumerate("abc", start=2):
            assert write(part) is None
            assert len(client.taken) == count  # the status line came first

    client = streamed(work)
    assert client.taken[0]["status"] == 200 and client.body == "abc!" and client.is_complete


def test_what_has_to_wait_goes_through_later_and_in_order() -> None:
    async def work(client: Client, write: Writer) -> None:
        client.gate.clear()
        busy = write("a")
        assert busy is not None and write("b") is busy and not client.taken
        client.gate.set()
        await busy
        assert client.body == "ab" and write("c") is None

    assert streamed(work).body == "abc!"


def test_a_client_that_takes_nothing_is_left() -> None:
    async def work(client: Client, write: Writer) -> None:
        write("a")
        client.gate.clear()
        busy = write("b")
        assert busy is not None
        with pytest.raises(SlowReaderError):
            await busy
        raise SlowReaderError

    client = streamed(work, seconds=0.01)
    assert client.body == "a" and not client.is_complete


def test_a_client_that_goes_while_a_write_waits_ends_the_work() -> None:
    ended: list[BaseException] = []

    async def work(client: Client, write: Writer) -> None:
        client.gate.clear()
        write("a")
        client.gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            ended.append(cancelled)
            raise

    assert not streamed(work).taken and ended


@pytest.mark.parametrize(("written", "status"), [("", 429), ("a", 200)])
def test_an_error_is_plain_before_the_first_event_and_an_event_behind_it(written: str, status: int) -> None:
    async def work(client: Client, write: Writer) -> None:
        write(written)
        raise ApiError(429, "no more")

    client = streamed(work)
    assert client.taken[0]["status"] == status and "no more" in client.body
    assert client.body.startswith(f"{written}no more!") == (status == 200)


WRITES = 4  # two events, the end mark, the end of the body


@pytest.mark.parametrize("stuck_at", range(WRITES))
def test_a_write_that_does_not_go_through_ends_the_response(stuck_at: int) -> None:
    bodies: list[bytes] = []

    async def events() -> AsyncIterator[str]:
        for event in ("data: 1\n\n", "data: 2\n\n"):
            yield event

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if len(bodies) == stuck_at:
                await asyncio.Event().wait()
            bodies.append(message["body"])

    async def scenario() -> None:
        stream = EventStream(relayed(events()), write_timeout=0.05)
        await asyncio.wait_for(stream({"type": "http"}, receive, send), timeout=30)

    asyncio.run(scenario())
    assert bodies == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"][:stuck_at]
