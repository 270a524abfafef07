"""/v1/responses: OpenAI's newer chat API, without its store.

Each body becomes a chat; responses_body.py and responses_reply.py translate.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.begin import begin_chat
from server.responses_body import ResponsesBody
from server.responses_reply import ResponsesReply, error_event
from server.routes.openai import Api, answer
from server.strict_json import StrictRoute

router = APIRouter(prefix="/v1", route_class=StrictRoute)


@router.post("/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation, in items."""
    reply = ResponsesReply(body)
    api = Api(reply.whole, reply.events, reply.last_events, error_event, end="")
    return await answer(request, body.as_chat(), begin_chat, api, body.warnings())
