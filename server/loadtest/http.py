"""A small HTTP/1.1 client on asyncio transports: it stamps each read with the clock and hands the bytes on.

Knows nothing about events, tokens or load; connections are kept alive and reused.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

Clock = Callable[[], float]


class Reply(Protocol):
    """Receives one reply; `now` is the time of the read that brought the bytes."""

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None: ...
    def on_body(self, data: bytes, now: float) -> None: ...
    def on_end(self, now: float) -> None: ...


class Moments(Protocol):
    """Where the client notes when the connection stood and when the first byte came, seconds of its clock."""

    connected: float
    first_byte: float


class HttpError(Exception):
    """The exchange failed below the level of a status code; `kind` is connect, reset or protocol."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reply: Reply | None = None
        self._moments: Moments | None = None
        self.closed = False
        self.reusable = True
        self.silent = True
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._soon = asyncio.get_running_loop().call_soon

    def start(self, request: bytes, reply: Reply, moments: Moments) -> asyncio.Future[None]:
        """Write the request; the future ends with the reply, or fails with HttpError."""
        self._reply, self._moments, self.silent = reply, moments, True
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._finished = asyncio.get_running_loop().create_future()
        moments.connected = self._clock()
        self.transport.write(request)
        return self._finished

    def data_received(self, data: bytes) -> None:
        """Stamp and return: the bytes are read once every stream that is ready has its stamp."""
        self._soon(self._read, data, self._clock())

    def _read(self, data: bytes, now: float) -> None:
        self.now = now
        if self._reply is None or self._moments is None:
            self.reusable = False  # bytes that nobody asked for
            return
        if self.silent:
            self.silent, self._moments.first_byte = False, now
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError("protocol", str(error) or "not HTTP"))
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._reply is not None
        self._reply.on_head(self._parser.get_status_code(), self._headers, self.now)

    def on_body(self, data: bytes) -> None:
        assert self._reply is not None
        self._reply.on_body(data, self.now)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.reusable = self.reusable and self._parser.should_keep_alive()
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed, self.reusable = True, False
        self._soon(self._lost, error, self._clock())

    def _lost(self, error: Exception | None, now: float) -> None:
        self.now = now
        framed = self._reply is None or "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and not self.silent and not framed:
            self._end()  # the body is whatever came before the close
        else:
            self._fail(HttpError("reset", f"the connection closed before the reply was whole ({error or 'EOF'})"))

    def _end(self) -> None:
        if self._reply is not None and not self._finished.done():
            self._reply.on_end(self.now)
            self._finished.set_result(None)
        self._reply = None

    def _fail(self, error: HttpError) -> None:
        if self._reply is not None and not self._finished.done():
            self._finished.set_exception(error)
        self._reply = None


class HttpClient:
    """Exchanges with one server. `base_url` may carry a path, which precedes every target."""

    def __init__(self, base_url: str, clock: Clock, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a server address: {base_url!r} (expected something like http://127.0.0.1:8000)")
        self.host, self.secure = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.clock = clock
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nUser-Agent: ropeway-bench\r\n{authorization}"
        self._idle: list[Connection] = []
        self._context = ssl.create_default_context() if self.secure else None

    async def exchange(
        self, method: str, target: str, body: bytes, reply: Reply, moments: Moments, extra: str = ""
    ) -> None:
        """One request and its whole reply. Raises HttpError; a cancelled call closes its connection."""
        head = f"{method} {self.prefix}{target} HTTP/1.1\r\n{self._head}{extra}"
        request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            fresh = not self._idle
            connection = await self._connect() if fresh else self._idle.pop()
            if connection.closed or not connection.reusable:
                continue
            try:
                await connection.start(request, reply, moments)
                break
            except HttpError:
                if fresh or not connection.silent:
                    raise  # an idle connection that the server had just closed is worth one more try; this is not
            finally:
                self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        if connection.reusable and not connection.closed and connection._reply is None:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self.clock), self.host, self.port, ssl=self._context
            )
        except OSError as error:
            raise HttpError("connect", f"cannot connect to {self.host}:{self.port}: {error}") from error
        return connection

    async def fetch(self, method: str, target: str, body: bytes = b"", seconds: float = 60.0) -> tuple[int, bytes]:
        """A whole reply, for small things. Raises HttpError, of kind timeout where it takes longer than `seconds`."""
        reply = _Whole()
        try:
            async with asyncio.timeout(seconds):
                await self.exchange(method, target, body, reply, reply)
        except TimeoutError:
            raise HttpError("timeout", f"{method} {target}: no whole reply within {seconds:g} s") from None
        return reply.status, bytes(reply.body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.abort()


class _Whole:
    """A reply kept whole."""

    connected = first_byte = 0.0

    def __init__(self) -> None:
        self.status, self.body = 0, bytearray()

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data

    def on_end(self, now: float) -> None:
        pass
