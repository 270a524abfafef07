"""Ends work for a client that has gone, and writes event streams that such a client cannot clog.

Knows ASGI only: neither the engine nor any API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class SlowReaderError(Exception):
    """The client does not take what is written."""


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


def event_text(value: dict[str, Any]) -> str:
    return f"data: {dumps(value)}\n\n"


dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def error_text(error: ApiError) -> str:
    return event_text(error.body())


class EventStream(Response):
    """Server-sent events from an iterator of whole events.

    The status line waits for the first event: a request that fails before it gets a plain error. Later errors become
    an error event. The body goes past the middleware, which has no business with it. When a write does not go through
    within write_timeout seconds, on_slow is told and the response is left unfinished, on which the server closes the
    connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        write_timeout: float,
        on_slow: Callable[[], None],
        error_event: Callable[[ApiError], str] = error_text,
        end: str = DONE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_timeout, self._on_slow = write_timeout, on_slow
        self._error_event, self._end = error_event, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._write_all(scope, receive, send))

    async def _write_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                first = await anext(events, "")
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            send_body = scope.get("state", {}).get("send_body", send)
            with suppress(SlowReaderError):
                async with Writer(send_body, self._write_timeout, self._on_slow) as write:
                    await write(first)
                    await self._write_rest(events, write)
                    await write.end()

    async def _write_rest(self, events: AsyncIterator[str], write: Writer) -> None:
        """An error after the first event is an event, and the end mark comes in any case."""
        try:
            async for event in events:
                await write(event)
        except ApiError as error:
            await write(self._error_event(error))
        if self._end:
            await write(self._end)


class Writer:
    """Writes parts of a body, each in at most `seconds`; else on_slow is told and SlowReaderError ends the block.

    One timer serves all writes, and looks at its clock when it rings: a timer for each would cost more than the write.
    """

    def __init__(self, send: Send, seconds: float, on_slow: Callable[[], None]) -> None:
        self._send, self._seconds, self._on_slow = send, seconds, on_slow
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._begun: float | None = None

    async def __call__(self, part: str) -> None:
        await self._write({"type": "http.response.body", "body": part.encode(), "more_body": True})

    async def end(self) -> None:
        """The body is complete."""
        await self._write({"type": "http.response.body", "body": b""})

    async def _write(self, message: Message) -> None:
        self._begun = self._loop.time()
        await self._send(message)
        self._begun = None

    async def __aenter__(self) -> Writer:
        self._timer = self._loop.call_later(self._seconds, self._look)
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError:
            raise SlowReaderError from None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._begun is None else self._begun) + self._seconds
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._on_slow()
            self._limit.reschedule(now)


def named_event(value: dict[str, Any]) -> str:
    """An event whose name is its type, as the Responses and Messages APIs have it."""
    return f"event: {value['type']}\n{event_text(value)}"
