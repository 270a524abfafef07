"""/v1/embeddings, /tokenize and /detokenize: text to numbers and back, without generating.

Only embeddings ask the engine.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.begin import chat_tokens, prompt_tokens, warn_unknown
from server.client import EngineClient, EngineDeadError, StreamCutError
from server.disconnect import unless_disconnected
from server.engine.messages import Row, SamplingParams, Submit
from server.errors import ApiError, bad_request
from server.events import dumps
from server.generation import engine_is_dead, queue_is_full, refusal_of
from server.places import QueueFullError, TooManyError
from server.schemas import ChatBody
from server.service import Service
from server.strict_json import StrictRoute
from server.text import decode
from server.token_bodies import DetokenizeBody, EmbeddingsBody, TokenizeBody

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """The model's state after each text, as a vector of length 1."""
    service: Service = request.app.state.service
    client = service.engine()

    async def work() -> Response:
        warnings = warn_unknown(service, list(body.model_extra or {}))
        model = service.check_model(body.model)
        prompts = await prompt_tokens(service, body.input, body.add_special_tokens is not False)
        for tokens in prompts:
            service.limits.check_prompt(tokens, "input")
        submits = embed_submits(service, request, body, prompts)
        vectors = await embed(client, submits, body.timeout, body.queue_timeout)
        count = sum(map(len, prompts))
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        reply = {"object": "list", "data": data, "model": model, "pooling": body.pooling or "last", "usage": usage}
        return Response(dumps(reply | ({"warnings": warnings} if warnings else {})), media_type="application/json")

    response = await unless_disconnected(request.receive, work())
    return response if response is not None else Response(status_code=499)


def embed_submits(
    service: Service, request: Request, body: EmbeddingsBody, prompts: Sequence[list[int]]
) -> list[Submit]:
    request_id, tenant = f"{request.state.request_id}.{service.next_serial()}", request.state.caller.tenant
    nothing = SamplingParams(max_tokens=0)
    return [
        Submit(
            f"{request_id}-{index}",
            Submit.pack(tokens),
            nothing,
            tenant,
            body.priority or 0,
            "embed",
            pooling=body.pooling or "last",
        )
        for index, tokens in enumerate(prompts)
    ]


async def embed(
    client: EngineClient, submits: Sequence[Submit], timeout: float | None, queue_timeout: float | None
) -> list[tuple[float, ...]]:
    """One vector a submit, in order; ApiError when there is none."""
    vectors: dict[str, tuple[float, ...]] = {}

    def take(rows: list[Row]) -> None:
        vectors.update((row.id, vector_of(row)) for row in rows)

    try:
        async with client.stream(submits, take, timeout, queue_timeout) as stream:
            await stream.wait()
    except StreamCutError as cut:
        raise refusal_of(cut) from None
    except QueueFullError as full:
        raise queue_is_full(full) from None
    except TooManyError as error:
        raise bad_request(str(error)) from None
    except EngineDeadError as dead:
        raise engine_is_dead(dead) from None
    return [vectors[submit.id] for submit in submits]


def vector_of(row: Row) -> tuple[float, ...]:
    if row.embedding is None:
        raise ApiError(500, row.error or "the engine gave this request up", code="request_failed")
    return row.embedding


def encoded(vector: Sequence[float], encoding: str | None) -> list[float] | str:
    """base64: of little-endian 32-bit floats, as OpenAI's client asks for by default."""
    return base64.b64encode(array("f", vector).tobytes()).decode() if encoding == "base64" else list(vector)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would see it."""
    service: Service = request.app.state.service
    service.engine()
    service.check_model(body.model)
    if body.prompt is not None:
        [tokens] = await service.tokenizer.encode_aside([body.prompt], body.add_special_tokens is not False)
    else:
        names = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"}
        tokens = await chat_tokens(service, ChatBody(**body.model_dump(include=names, exclude_none=True)))
    vocabulary = service.tokenizer.vocabulary
    names_of_tokens = [vocabulary.label(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.limits.max_model_len,
        "tokens": tokens,
        "token_strs": names_of_tokens,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of token ids, control tokens included."""
    service: Service = request.app.state.service
    service.engine()
    service.check_model(body.model)
    service.limits.check_ids(body.tokens, "tokens")
    return {"prompt": decode(service.tokenizer.vocabulary, body.tokens, skip_special=False)}
