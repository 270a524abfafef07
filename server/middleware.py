"""The gate in front of every route: request id, API key, size and time of the body.

Plain ASGI, so that nothing stands between a stream and its socket. Knows no route but the open ones.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.caller import Keys
from server.config import ServeConfig
from server.error_responses import response_of
from server.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/startupz"})
PAGE = "/ui/"
"""A browser cannot send a key for a page and its files, and there is nothing in them to hide."""
CLOSE = {"Connection": "close"}
"""With the rest of a body unread, the connection is of no further use."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Wraps the app. A refused request never reaches it."""

    def __init__(self, app: ASGIApp, config: ServeConfig, on_refusal: Callable[[int], None]) -> None:
        self._app, self._config, self._on_refusal = app, config, on_refusal
        self._keys = Keys(config.api_key, config.admin_api_key)
        self._open = OPEN_PATHS if config.metrics_need_key else OPEN_PATHS | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["send_body"] = send
        send = self._watch(send, request_id, is_probe=scope["path"] in self._open)
        scope["state"]["caller"] = self._keys.caller(sent_key(headers))
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await response_of(refusal)(scope, receive, send)
        else:
            await self._app(scope, BodyLimit(receive, self._config).receive, send)

    def _watch(self, send: Send, request_id: str, is_probe: bool) -> Send:
        """send() that adds the request's id and reports refusals, those of probes aside."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if message["status"] >= 400 and not is_probe:
                    self._on_refusal(message["status"])
            await send(message)

        return watched

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(PAGE)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if scope["state"]["caller"] is None and not self._is_open(scope["path"]):
            header = {"WWW-Authenticate": "Bearer"}
            return ApiError(
                401, "send a valid API key: Authorization: Bearer KEY", code="invalid_api_key", headers=header
            )
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            return ApiError(415, f"Content-Encoding {encoding[:40]!a} is not supported: send the body as it is")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:19]) > self._config.max_body_bytes:
            return too_large(self._config.max_body_bytes, f"{length[:19]} were announced")
        return None


def sent_key(headers: Headers) -> bytes:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")


class BodyLimit:
    """receive() of one request, which fails once the body is too long or too slow."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive, self._config = receive, config
        self._size = 0
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + config.body_timeout

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive within {self._config.body_timeout:g} s"
            raise HTTPException(408, text, CLOSE) from None
        self._size += len(message.get("body", b""))
        if self._size > self._config.max_body_bytes:
            error = too_large(self._config.max_body_bytes, f"{self._size} have come so far")
            raise HTTPException(error.status, error.message, CLOSE)
        self._complete = not message.get("more_body", False)
        return message


def too_large(limit: int, sent: str) -> ApiError:
    return ApiError(413, f"the body may have {limit} bytes ({sent})", code="body_too_large", headers=CLOSE)
