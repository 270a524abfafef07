"""/v1/completions, /v1/chat/completions and /v1/models.

Takes requests in and sends replies out; knows neither what a body means (begin.py) nor how a reply looks (replies.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.begin import begin_chat, begin_completion, read_warnings
from server.choice import Delta
from server.disconnect import EventStream, Writer, unless_disconnected
from server.errors import ApiError
from server.events import DONE, dumps, error_text
from server.generation import Show
from server.replies import Reply
from server.schemas import ChatBody, CompletionBody
from server.service import Service
from server.strict_json import StrictRoute

router = APIRouter(prefix="/v1", route_class=StrictRoute)


@router.post("/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue a text."""
    return await answer(request, body, begin_completion)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, body, begin_chat)


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The names under which the one model is served."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [model_object(service, name) for name in service.names]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of the names."""
    service: Service = request.app.state.service
    return model_object(service, service.check_model(name))


def model_object(service: Service, name: str) -> dict[str, Any]:
    base = {"id": name, "object": "model", "created": int(service.started_at), "owned_by": "ropeway"}
    return base | ({"max_model_len": service.info.max_model_len} if service.info is not None else {})


@dataclass(frozen=True, slots=True)
class Api:
    """How an API writes what a generation brings: whole, as events, and what ends a stream."""

    whole: Callable[[Reply], dict[str, Any]]
    events: Callable[[Reply, list[Delta]], str]
    last_events: Callable[[Reply], str]
    error_event: Callable[[ApiError], str]
    end: str


OPENAI = Api(Reply.whole, Reply.events, Reply.last_events, error_text, DONE)


async def answer(
    request: Request,
    body: Any,
    begin: Callable[[Service, Any, str], Awaitable[Reply]],
    api: Api = OPENAI,
    more_warnings: Sequence[str] = (),
) -> Response:
    """Check, generate, reply. A client that leaves takes its work with it, whatever phase it is in."""
    service: Service = request.app.state.service
    client = service.engine()

    async def work() -> Response:
        warnings = [*read_warnings(service, body), *more_warnings]
        reply = await begin(service, body, request.state.request_id)
        request.state.reply = reply
        reply.generation.warnings += warnings
        reply.generation.set_tenant(request.state.caller.tenant_of(body.cache_salt))
        reply.generation.kv_usage = bool(body.kv_usage)
        run = partial(reply.generation.run, client, timeout=body.timeout, queue_timeout=body.queue_timeout)
        if body.stream:
            events = partial(write_events, api, reply, run)
            return EventStream(events, service.config.slow_reader_timeout, api.error_event, api.end)
        await run(reply.add)
        return Response(dumps(api.whole(reply)), media_type="application/json")

    response = await unless_disconnected(request.receive, work())
    return response if response is not None else Response(status_code=499)


async def write_events(api: Api, reply: Reply, run: Callable[[Show], Awaitable[None]], write: Writer) -> None:
    await run(lambda deltas: write(api.events(reply, deltas)))
    write(api.last_events(reply))
