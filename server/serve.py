"""`ropeway serve`: binds the port, loads behind it, runs until told to stop, drains, ends with an exit code.

Knows processes and signals, no route: what is served is app.py's.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from server.app import create_app
from server.client import EngineClient
from server.config import ServeConfig
from server.engine.facts import EngineInfo
from server.header_timeout import protocol_with
from server.loop_lateness import watch_loop
from server.prepare import prepare
from server.request_log import json_log_config, log_request
from server.service import MakeClient, Service, StartupError
from server.watch import Watched

if TYPE_CHECKING:
    from server.tracing import Tracing

FLUSH_SECONDS = 3
"""After the drain deadline, for last events to reach their readers."""
MIB = 1024**2
QUESTION = "What is the capital of France?"


class DrainingServer(uvicorn.Server):
    """A first signal starts the drain: listeners stay open, so that probes and clients are told. A second ends it."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._deadline = 0.0
        self._told = False
        service.on_failure = self.stop

    def stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        patience = 0.0 if self._service.draining else self._service.config.drain_timeout
        self._service.draining = True
        self._deadline = time.monotonic() + patience

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and not self.should_exit:
            self.should_exit = self._drained()
            self._tell_once()
        return await super().on_tick(counter)

    def _tell_once(self) -> None:
        client = self._service.client
        if not self._told and not self.should_exit and client is not None:
            seconds = self._service.config.drain_timeout
            print(
                f"ropeway: finishing {client.open_sequences} open requests, {seconds:g} s at most (--drain-timeout); "
                "another signal ends at once",
                flush=True,
            )
        self._told = True

    def _drained(self) -> bool:
        """Nothing is left to finish, or its time is over; then it is ended here."""
        client = self._service.client
        if client is None or not client.open_sequences:
            return True
        if time.monotonic() < self._deadline:
            return False
        client.abort_all("drain")
        return True


class Lifespan:
    """Loads the model beside the server, so that the port answers at once, and ends the engine with it."""

    def __init__(self, app: ASGIApp, service: Service, url: str) -> None:
        self._app, self._service, self._url = app, service, url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        async with self._running():
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._load())
        watching = asyncio.create_task(watch_loop(self._service.metrics.lateness.observe))
        try:
            yield
        finally:
            loading.cancel()
            watching.cancel()
            await asyncio.gather(loading, watching, return_exceptions=True)
            await self._service.close()

    async def _load(self) -> None:
        await self._service.load()
        if self._service.info is not None and self._service.failure is None:
            print("\n".join(start_lines(self._service, self._service.info, self._url)), flush=True)


def serve(config: ServeConfig, make_client: MakeClient = EngineClient) -> int:
    """Run a server to its end. 0 after a drain, 1 after a failure (its one line is on stderr)."""
    try:
        listener = bind(config.host, config.port)
        tracing = start_tracing(config)
    except StartupError as error:
        print(f"ropeway: {error}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    service = Service(config, prepare, make_client)
    observers: list[Callable[[Watched], None]] = [tracing.observe] if tracing is not None else []
    if config.log_format == "json":
        observers.append(partial(log_request, log_prompts=config.log_prompts))
    settings = uvicorn.Config(
        Lifespan(create_app(service, observers), service, url),
        http=protocol_with(config.header_timeout),
        log_config=json_log_config() if config.log_format == "json" else LOGGING_CONFIG,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        lifespan="on",
        timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # whole seconds by type, any in use
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log and config.log_format == "text",
        timeout_graceful_shutdown=FLUSH_SECONDS,
        server_header=False,
    )
    print(f"ropeway: listening on {url}, loading {config.model or 'the demo model'}", flush=True)
    DrainingServer(settings, service).run(sockets=[listener])
    if tracing is not None:
        tracing.close()
    return 0 if service.failure is None else 1


def start_tracing(config: ServeConfig) -> Tracing | None:
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from server.tracing import Tracing
    except ImportError:
        raise StartupError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'ropeway[otel]'") from None
    return Tracing(config.otlp_traces_endpoint)


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another "
            f"{'--port' if error.errno in (errno.EADDRINUSE, errno.EACCES) else '--host'}"
        ) from None
    return listener


def start_lines(service: Service, info: EngineInfo, url: str) -> list[str]:
    """What the operator wants to know: bytes, whether tokens depend on the batch, and a line to try."""
    name, capacity = service.names[0], (sum(info.num_pages) - len(info.num_pages)) * info.page_size
    invariance = (
        "on: the same request gives the same tokens in any batch"
        if info.batch_invariant
        else ("off: tokens may depend on what shares the batch (--batch-invariant turns it on)")
    )
    defaults = f" sampling defaults of the model: {service.limits.defaults};" if service.limits.defaults else ""
    messages = f'[{{"role": "user", "content": "{QUESTION}"}}]'
    body = f'{{"model": "{name}", "stream": true, "temperature": 0, "messages": {messages}}}'
    path = "chat/completions"
    if service.template is None:
        body, path = f'{{"model": "{name}", "max_tokens": 64, "prompt": "Once upon a time"}}', "completions"
    return [
        f"ropeway: KV cache {mib(info.kv_bytes_predicted)} predicted, {mib(info.kv_bytes_allocated)} allocated, "
        f"{mib(info.kv_bytes_resident)} resident; "
        f"weights {mib(info.weights_bytes)}; engine process {mib(info.rss_bytes)}",
        f"ropeway: {name} on {info.device} ({kind_of_weights(info)}, KV {info.kv_dtype}, "
        f"{info.threads} threads; {info.backend}); "
        f"context {info.max_model_len} tokens, {capacity} tokens in the pool;{defaults} ready at {url}",
        *graph_lines(info),
        *(f"ropeway: warning: {warning}" for warning in info.warnings),
        f"ropeway: batch invariance {invariance}",
        f"curl -N {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'",
    ]


def kind_of_weights(info: EngineInfo) -> str:
    """The dtype, and what weights were rounded to."""
    if info.quantization is None:
        return info.dtype
    return f"{info.dtype}, weights {info.quantization}" + (", head int8" if info.quantization != "int8" else "")


def graph_lines(info: EngineInfo) -> list[str]:
    """What recording the decode steps of a GPU took."""
    if not info.graphs:
        return []
    taken = f"{info.graph_seconds:.1f} s, {mib(info.graph_bytes)}"
    return [f"ropeway: decode steps of {info.graphs} batch sizes recorded as graphs: {taken}"]


def mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"
