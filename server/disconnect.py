"""Ends work for a client that has gone, and writes event streams that such a client cannot clog.

Knows ASGI only: neither the engine nor any API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def error_text(error: ApiError) -> str:
    return event_text(error.body())


class EventStream(Response):
    """Server-sent events from an iterator of whole events.

    The status line waits for the first event: a request that fails before it gets a plain error. Later errors become
    an error event. When a write does not go through within write_timeout seconds, on_slow is told and the response is
    left unfinished, on which the server closes the connection.
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
        try:
            await unless_disconnected(receive, self._write_all(scope, receive, send))
        except SlowReaderError:
            return

    async def _write_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._guarded()) as events:  # type: ignore[type-var]
            try:
                first = await anext(events)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, first)
            async for event in events:
                await self._write(send, event)
            await send({"type": "http.response.body", "body": b""})

    async def _guarded(self) -> AsyncIterator[str]:
        """The events; an error after the first one as an event, and the end mark in any case."""
        started = False
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    yield event
                    started = True
            except ApiError as error:
                if not started:
                    raise
                yield self._error_event(error)
        if self._end:
            yield self._end

    async def _write(self, send: Send, event: str) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except TimeoutError:
            self._on_slow()
            raise SlowReaderError from None


def named_event(value: dict[str, Any]) -> str:
    """An event whose name is its type, as the Responses and Messages APIs have it."""
    return f"event: {value['type']}\n{event_text(value)}"
