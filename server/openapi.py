"""What FastAPI cannot know about our routes: the error object and when it comes, event streams, examples of replies.

Knows paths and shapes, calls nothing.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from server.reply_schemas import CHUNKS, REPLIES

ERRORS = {
    "400": "The request is at fault; the message names the field, its limit and what was sent",
    "401": "No valid API key",
    "404": "No such model or endpoint",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is compressed",
    "429": "The queue is full; see Retry-After",
    "500": "The server's fault",
    "503": "Loading, draining, stalled, or queue_timeout has passed",
}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"type": "string", "description": "error, in Anthropic's API alone"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}
USAGE = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0}}
MODEL = {"id": "m", "object": "model", "created": 1790000000, "owned_by": "ropeway", "max_model_len": 8192}
MESSAGES_USAGE = {
    "input_tokens": 12,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "output_tokens": 2,
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "id": "cmpl-1f",
        "object": "text_completion",
        "created": 1790000000,
        "model": "m",
        "choices": [{"index": 0, "text": " time", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
    },
    "/v1/chat/completions": {
        "id": "chatcmpl-1f",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    },
    "/v1/messages": {
        "id": "msg_1f",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hi!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": MESSAGES_USAGE,
    },
    "/v1/messages/count_tokens": {"input_tokens": 12},
    "/v1/embeddings": {
        "object": "list",
        "model": "m",
        "pooling": "last",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    },
    "/tokenize": {"count": 2, "max_model_len": 8192, "tokens": [72, 105], "token_strs": ["H", "i"]},
    "/detokenize": {"prompt": "Hi"},
    "/v1/models": {"object": "list", "data": [MODEL]},
    "/v1/models/{name}": MODEL,
    "/version": {"version": "0.1.0", "device": "cpu", "backend": "cpu", "batch_invariant": True},
}
STREAMING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
TEXTS = {"/": "text/html", "/metrics": "text/plain", "/kv/stream": "text/event-stream"}
"""Routes that never answer JSON."""


def install(app: FastAPI) -> None:
    app.openapi = cache(partial(described, app))  # type: ignore[method-assign]


def described(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title="Ropeway", version="1", routes=app.routes)
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    whole, parts = schemas_of(REPLIES), schemas_of(CHUNKS)
    schemas |= whole.pop("$defs") | parts.pop("$defs")
    for path, methods in found["paths"].items():
        for method in methods.values():
            method["responses"] = success(path, method["responses"], whole, parts) | errors()
    return found


def schemas_of(shapes: dict[str, TypeAdapter[Any]]) -> dict[str, Any]:
    """JSON schemas by path, and under $defs what they refer to."""
    by_path, definitions = TypeAdapter.json_schemas(
        [(path, "serialization", shape) for path, shape in shapes.items()], ref_template="#/components/schemas/{model}"
    )
    return {path: schema for (path, _), schema in by_path.items()} | definitions


def success(path: str, responses: dict[str, Any], whole: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    content = responses["200"].get("content", {"application/json": {}})
    if path in EXAMPLES:
        content = {"application/json": content.get("application/json", {}) | {"example": EXAMPLES[path]}}
    if path in whole:
        content = {"application/json": content.get("application/json", {}) | {"schema": whole[path]}}
    if path in STREAMING:
        event = {"x-event-schema": parts[path]} if path in parts else {}  # OpenAPI 3.1 has no word for one event
        content["text/event-stream"] = {"schema": {"type": "string"}, **event}
    if path in TEXTS:
        content = {TEXTS[path]: {"schema": {"type": "string"}}}
    return {"200": responses["200"] | {"content": content}}


def errors() -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": schema} for status, text in ERRORS.items()}
