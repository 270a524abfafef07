"""create_app: the routes, the errors and the gate of one server, around a Service.

Starts nothing: serve.py runs it, tests drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server import error_responses, openapi
from server.middleware import Gate
from server.routes import health, kv, messages, openai, responses, tokens, ui
from server.service import Service
from server.watch import Watch, Watched


def create_app(service: Service, observers: Sequence[Callable[[Watched], None]] = ()) -> ASGIApp:
    """The ASGI app of a service, whatever state it is in: it answers 503 where it cannot work yet."""
    app = FastAPI(title="Ropeway", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    error_responses.install(app)
    openapi.install(app)
    for routes in (health.router, kv.router, openai.router, responses.router, messages.router, tokens.router):
        app.include_router(routes)
    if service.config.ui:
        app.include_router(ui.router)
    gated: ASGIApp = Gate(app, service.config, service.metrics.rejected)
    if observers:
        gated = Watch(gated, observers, keep_body=service.config.log_prompts)
    origins = service.config.cors_allow_origin
    return with_cors(gated, origins) if origins else gated


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Keys travel in headers, never in cookies, so credentials stay off and any origin may be allowed."""
    exposed = ["X-Request-Id", "Retry-After"]
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed
    )
