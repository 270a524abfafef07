"""A protocol for uvicorn that closes connections whose request line and headers do not come in time.

uvicorn itself arms a timer only after a response, so a client that never finishes its headers would stay for ever.
Knows connections, no requests; the time of a body is middleware.py's.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def protocol_with(seconds: float) -> type[HttpToolsProtocol]:
    """The class to pass as uvicorn's http setting."""

    class TimedProtocol(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def on_message_begin(self) -> None:
            """Of a first request the timer runs already; of a later one it starts with its first byte."""
            self._arm()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._disarm()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(seconds, self.transport.close)

        def _disarm(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return TimedProtocol
