"""Every error as an OpenAI error object: one exception, one shape.

Knows status codes and words: no web framework, no routes and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is not 200. param names the field at fault; code is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def shown(value: object) -> str:
    """The value a client sent, short enough for a message."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first thing that pydantic finds wrong with a body, with the field's path and the value sent."""
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "value_error":  # fields that do not go together
        return bad_request(str(first["ctx"]["error"]), path or None)
    if not path:
        return bad_request("the body must be a JSON object sent as Content-Type: application/json")
    if first["type"] == "missing":
        return bad_request(f"{path}: this field is required", path)
    return bad_request(f"{path}: {first['msg']} (got {shown(first.get('input'))})", path)
