"""Every error as an OpenAI error object: one exception, one shape, for our errors and the framework's alike.

Knows status codes and words, no routes and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

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

    def response(self) -> Response:
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, "application/json")


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


def from_http(error: HTTPException, request: Request) -> ApiError:
    where = f"{request.method} {request.url.path}"
    known = {404: f"{where}: there is no such endpoint", 405: f"{where}: this endpoint has other methods"}
    message = str(error.detail) if error.detail != HTTPStatus(error.status_code).phrase else ""
    return ApiError(error.status_code, message or known.get(error.status_code, error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Turn all that the framework or a route raises into error objects."""

    async def api(request: Request, error: ApiError) -> Response:
        return error.response()

    async def validation(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    async def http(request: Request, error: HTTPException) -> Response:
        return from_http(error, request).response()

    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, f"internal error ({type(error).__name__}); the server log has the details").response()

    handlers: list[tuple[type[Exception], Any]] = [
        (ApiError, api),
        (RequestValidationError, validation),
        (HTTPException, http),
        (Exception, unexpected),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)
