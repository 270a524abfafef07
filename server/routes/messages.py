"""/v1/messages and /v1/messages/count_tokens: Anthropic's API.

Each body becomes a chat; messages_body.py and messages_reply.py translate. Errors have Anthropic's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response

from server.begin import begin_chat, chat_tokens
from server.errors import ApiError, from_validation
from server.messages_body import CountBody, MessagesBody
from server.messages_reply import MessagesReply, error_body, error_event
from server.routes.openai import Api, answer
from server.service import Service
from server.strict_json import StrictRoute


class MessagesRoute(StrictRoute):
    """Errors as Anthropic's clients read them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as invalid:
                error = from_validation(invalid.errors())
            except ApiError as refused:
                error = refused
            return JSONResponse(error_body(error), error.status, error.headers)

        return with_errors


router = APIRouter(prefix="/v1", route_class=MessagesRoute)


@router.post("/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation, in blocks."""
    reply = MessagesReply()
    api = Api(reply.whole, reply.events, reply.last_events, error_event, end="")
    return await answer(request, body.as_chat(), begin_chat, api, body.warnings())


@router.post("/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """How many tokens the conversation is, with the chat template around it."""
    service: Service = request.app.state.service
    service.engine()
    service.check_model(body.model)
    return {"input_tokens": len(await chat_tokens(service, body.as_chat()))}
