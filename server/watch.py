"""Watches every request to its end, for those who write about requests: the log and the traces.

Plain ASGI. Knows what was sent and received, not what it means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from server.replies import Reply

BODY_KEPT = 64 * 1024


@dataclass(slots=True)
class Watched:
    """One request. Times are seconds since the epoch; status 499 is a client that left before the answer."""

    scope: Scope
    started: float = field(default_factory=time.time)
    first_byte: float | None = None
    ended: float = 0.0
    status: int = 499
    body: bytearray = field(default_factory=bytearray)

    @property
    def request_id(self) -> str:
        return str(self.scope["state"]["request_id"])

    @property
    def reply(self) -> Reply | None:
        """What a generating route answered with."""
        reply: Reply | None = self.scope["state"].get("reply")
        return reply

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), "")


class Watch:
    """Calls every observer once a request has ended. keep_body: hold the first 64 KiB of each body for them."""

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[Watched], None]], keep_body: bool) -> None:
        self._app, self._observers, self._keep_body = app, observers, keep_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = Watched(scope)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                watched.status = message["status"]
            elif watched.first_byte is None:
                watched.first_byte = time.time()
            await send(message)

        async def watched_receive() -> Message:
            message = await receive()
            watched.body += message.get("body", b"")[: BODY_KEPT - len(watched.body)]
            return message

        try:
            await self._app(scope, watched_receive if self._keep_body else receive, watched_send)
        finally:
            watched.ended = time.time()
            for observe in self._observers:
                observe(watched)
