"""Which endpoint answers what: the reply schemas of /openapi.json.

Knows paths and shapes.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from server.openai_shapes import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Embeddings,
    Model,
    Models,
    Text,
    Tokens,
)
from server.other_shapes import AnthropicMessage, ResponseObject, TokenCount

REPLIES: dict[str, TypeAdapter[Any]] = {
    path: TypeAdapter(shape)
    for path, shape in {
        "/v1/completions": Completion,
        "/v1/chat/completions": ChatCompletion,
        "/v1/responses": ResponseObject,
        "/v1/messages": AnthropicMessage,
        "/v1/messages/count_tokens": TokenCount,
        "/v1/embeddings": Embeddings,
        "/tokenize": Tokens,
        "/detokenize": Text,
        "/v1/models": Models,
        "/v1/models/{name}": Model,
    }.items()
}
CHUNKS: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
}
"""One event of a stream, where all events are alike."""
