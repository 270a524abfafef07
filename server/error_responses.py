"""Errors as responses: ours, and what the framework or a route raises.

Knows the framework and the shape of an error, no routes and no engine.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from server.errors import ApiError, from_validation


def response_of(error: ApiError) -> Response:
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


def from_http(error: HTTPException, request: Request) -> ApiError:
    where = f"{request.method} {request.url.path}"
    known = {404: f"{where}: there is no such endpoint", 405: f"{where}: this endpoint has other methods"}
    message = str(error.detail) if error.detail != HTTPStatus(error.status_code).phrase else ""
    return ApiError(error.status_code, message or known.get(error.status_code, error.detail), headers=error.headers)


def install(app: FastAPI) -> None:
    """Turn all that the framework or a route raises into error objects."""

    async def api(request: Request, error: ApiError) -> Response:
        return response_of(error)

    async def validation(request: Request, error: RequestValidationError) -> Response:
        return response_of(from_validation(error.errors()))

    async def http(request: Request, error: HTTPException) -> Response:
        return response_of(from_http(error, request))

    async def unexpected(request: Request, error: Exception) -> Response:
        text = f"internal error ({type(error).__name__}); the server log has the details"
        return response_of(ApiError(500, text))

    handlers: list[tuple[type[Exception], Any]] = [
        (ApiError, api),
        (RequestValidationError, validation),
        (HTTPException, http),
        (Exception, unexpected),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)
