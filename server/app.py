"""create_app: the routes, the errors and the gate of one server, around a Service.

Starts nothing: serve.py runs it, tests drive it.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from server import errors
from server.middleware import Gate
from server.routes import health, kv, messages, openai, responses, tokens, ui
from server.service import Service


def create_app(service: Service) -> ASGIApp:
    """The ASGI app of a service, whatever state it is in: it answers 503 where it cannot work yet."""
    app = FastAPI(title="Ropeway", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    errors.install(app)
    for routes in (health.router, kv.router, openai.router, responses.router, messages.router, tokens.router):
        app.include_router(routes)
    if service.config.ui:
        app.include_router(ui.router)
    return Gate(app, service.config, service.metrics.rejected)
