"""Health, readiness, start-up phase, version and metrics.

Every answer comes from the service's state; nothing here waits for the engine.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.service import Service
from server.version import ropeway_version

router = APIRouter()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/livez")
async def live(request: Request) -> JSONResponse:
    """200 while this process is worth keeping: restart it on 503."""
    failure = service_of(request).failure
    return JSONResponse(
        {"status": "ok"} if failure is None else {"status": "failed", "reason": failure}, status(failure)
    )


@router.get("/readyz")
@router.get("/health")
async def ready(request: Request) -> JSONResponse:
    """200 when a request sent now would be served; 503 while loading, draining, stalled or failed."""
    reason = service_of(request).not_ready()
    return JSONResponse(
        {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}, status(reason)
    )


@router.get("/startupz")
async def startup(request: Request) -> JSONResponse:
    """Where the start is: phase, detail and seconds since the process came up. 503 until it is over."""
    service = service_of(request)
    loading = service.info is None or service.failure is not None
    body = {"phase": service.phase, "detail": service.detail, "elapsed_s": round(time.time() - service.started_at, 3)}
    return JSONResponse(body, 503 if loading else 200)


def status(reason: str | None) -> int:
    return 200 if reason is None else 503


@router.get("/version")
async def show_version(request: Request) -> dict[str, Any]:
    """What runs here."""
    info = service_of(request).info
    compute = ("device", "dtype", "quantization", "kv_dtype", "backend", "threads", "batch_invariant")
    facts = (*compute, "max_model_len", "prefix_caching")
    return {"version": ropeway_version()} | {name: getattr(info, name) for name in facts if info is not None}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(service_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
