"""/kv/summary, /kv/requests, /kv/pages and /kv/stream: who holds how much of the KV cache, now and so far.

Shapes nothing and keeps nothing: kv_live.py does.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.caller import Caller
from server.disconnect import EventStream, relayed
from server.errors import ApiError
from server.kv_live import KvLive
from server.service import Service

router = APIRouter(prefix="/kv")


def live_of(request: Request) -> KvLive:
    """ApiError 503 before the engine is up and after it has failed. A draining server still shows what it holds."""
    service: Service = request.app.state.service
    if service.kv is None or service.failure is not None:
        reason = service.not_ready() or "the server is starting"
        raise ApiError(503, reason, code="not_ready", headers={"Retry-After": "5"})
    return service.kv


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


@router.get("/summary")
async def summary(request: Request) -> dict[str, Any]:
    """The pool: bytes predicted, allocated and measured, pages by state, slots, byte-seconds, hit rate."""
    return await live_of(request).summary()


@router.get("/requests")
async def requests(request: Request) -> dict[str, Any]:
    """What each running or waiting sequence holds and has cost so far; others' requests as one sum."""
    return await live_of(request).requests(caller_of(request))


@router.get("/pages")
async def pages(request: Request) -> dict[str, Any]:
    """State, holders and hits of every page, as runs of equal neighbours."""
    return live_of(request).pages(caller_of(request))


@router.get("/stream")
async def stream(request: Request) -> Response:
    """Server-sent events: one snapshot of the map, then deltas, at most ten a second."""
    service: Service = request.app.state.service
    return EventStream(relayed(live_of(request).watch(caller_of(request))), service.config.slow_reader_timeout)
