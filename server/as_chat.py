"""What the other chat APIs share when their bodies become a ChatBody: extensions pass through, the rest is checked.

Knows ChatBody, neither of the APIs.
"""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from server.body import Body
from server.errors import bad_request
from server.schemas import ChatBody

EXTENSIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "queue_timeout",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "timeout",
        "top_k",
    }
)
"""Fields of chat completions that work in every API."""


def chat_body(fields: dict[str, Any], original: Body) -> ChatBody:
    """fields: what the adapter made of the body. Extra fields of the original come along, to work or to be named."""
    extra = {name: value for name, value in (original.model_extra or {}).items() if value is not None}
    foreign = next((name for name in extra if name in ChatBody.model_fields and name not in EXTENSIONS), None)
    if foreign is not None:
        raise bad_request(f"{foreign}: a field of /v1/chat/completions, which this endpoint has not", foreign)
    try:
        return ChatBody.model_validate(extra | {name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
