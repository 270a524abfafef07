"""Ends work for a client that has gone, and writes event streams that such a client cannot clog.

Knows ASGI only: neither the engine nor any API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.error_responses import response_of
from server.errors import ApiError
from server.events import DONE, error_text
from server.stream import Busy, SlowReaderError

T = TypeVar("T")


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of work, or None after cancelling it because the client has closed the connection."""
    task, gone = asyncio.create_task(work), asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: `work` is given a Writer and calls it with one or more whole events.

    The status line waits for the first event: a request that fails before it gets a plain error. Later errors become
    an error event. The body goes past the middleware, which has no business with it. When a write does not go through
    within write_timeout seconds, work is told by SlowReaderError and the response is left unfinished, on which the
    server closes the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[Writer], Awaitable[None]],
        write_timeout: float,
        error_event: Callable[[ApiError], str] = error_text,
        end: str = DONE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work, self._write_timeout = work, write_timeout
        self._error_event, self._end = error_event, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._write_all(scope, receive, send))

    async def _write_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        send_body = scope.get("state", {}).get("send_body", send)
        with suppress(SlowReaderError), closing(Writer(partial(send, start), send_body, self._write_timeout)) as write:
            try:
                await self._work(write)
            except ApiError as error:
                if not write.has_begun:
                    await response_of(error)(scope, receive, send)
                    return
                write(self._error_event(error))
            write(self._end)
            await write.end()


def relayed(events: AsyncIterator[str]) -> Callable[[Writer], Awaitable[None]]:
    """Work for an EventStream whose events are waited for one by one."""

    async def work(write: Writer) -> None:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                write(event)
                await write.drain()

    return work


class Writer:
    """Writes a response part by part, its status line before the first.

    What goes through at once, as nearly everything does, is sent within the call and wakes no task. What has to wait
    becomes a task with `seconds` to go through, and what is written meanwhile follows it.
    """

    def __init__(self, start: Callable[[], Awaitable[None]], send: Send, seconds: float) -> None:
        self._start, self._send, self._seconds = start, send, seconds
        self._parts: list[str] = []
        self._waiting: asyncio.Task[None] | None = None
        self.has_begun = False

    def __call__(self, part: str) -> Busy:
        """None if it went through, else what is done once it has; SlowReaderError if it never does."""
        if part:
            self._parts.append(part)
            if self._waiting is None:
                self._begin()
        return self._waiting

    def _begin(self) -> None:
        sending = begun(self._send_parts())
        if sending is not None:
            self._waiting = asyncio.create_task(self._await(sending))

    async def _send_parts(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._start()
        while self._parts:
            body = "".join(self._parts).encode()
            self._parts.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def drain(self) -> None:
        """Until everything has gone through."""
        if self._waiting is not None:
            await self._waiting

    async def end(self) -> None:
        """The body is complete."""
        await self.drain()
        await self._await(self._send({"type": "http.response.body", "body": b""}))

    async def _await(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await sending
        except TimeoutError:
            raise SlowReaderError from None
        finally:
            self._waiting = None

    def close(self) -> None:
        """Give up what has not gone through."""
        if self._waiting is not None:
            self._waiting.cancel()


class Begun(Generator[Any, Any, None]):
    """A coroutine that runs already and has said what it waits for. From Python 3.12 on a task can start so itself."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, [awaited]

    def __await__(self) -> Begun:
        return self

    def send(self, value: Any) -> Any:
        return self._awaited.pop() if self._awaited else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)


def begun(coroutine: Coroutine[Any, Any, None]) -> Begun | None:
    """Run it here until it has to wait: what is left then, None if it ended."""
    try:
        return Begun(coroutine, coroutine.send(None))
    except StopIteration:
        return None
