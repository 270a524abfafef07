"""OpenTelemetry traces: one span a generating request, in the GenAI conventions, sent over OTLP/HTTP.

Needs the extra `otel`. Knows finished requests only, so a trace costs nothing while tokens come.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.replies import Reply
from server.version import ropeway_version
from server.watch import Watched


class Tracing:
    """endpoint: the collector's URL for traces, for example http://localhost:4318/v1/traces."""

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "ropeway", "service.version": ropeway_version()})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("ropeway")
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, watched: Watched) -> None:
        """Requests that did not reach generation leave no span."""
        reply = watched.reply
        if reply is None:
            return
        operation = "text_completion" if reply.id.startswith("cmpl-") else "chat"
        span = self._tracer.start_span(
            f"{operation} {reply.model}",
            context=self._propagator.extract({"traceparent": watched.header(b"traceparent")}),
            kind=SpanKind.SERVER,
            start_time=int(watched.started * 1e9),
            attributes=attributes(watched, reply, operation),
        )
        if watched.status >= 400:
            span.set_attribute("error.type", str(watched.status))
            span.set_status(StatusCode.ERROR)
        span.end(int(watched.ended * 1e9))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def attributes(watched: Watched, reply: Reply, operation: str) -> dict[str, Any]:
    params, times = reply.generation.submits[0].params, reply.generation.times
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ropeway",
        "gen_ai.request.model": reply.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.id": reply.id,
        "gen_ai.response.model": reply.model,
        "gen_ai.response.finish_reasons": reply.generation.ends,
        "gen_ai.usage.input_tokens": reply.generation.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": reply.generation.cached_tokens,
        "gen_ai.usage.output_tokens": reply.generation.completion_tokens,
        "gen_ai.latency.time_in_queue": times.queue,
        "gen_ai.latency.time_in_model_prefill": times.prefill,
        "gen_ai.latency.time_in_model_decode": times.decode,
        "gen_ai.latency.e2e": watched.ended - watched.started,
        "http.response.status_code": watched.status,
        "ropeway.request_id": watched.request_id,
    }
    if watched.first_byte is not None:
        found["gen_ai.latency.time_to_first_token"] = watched.first_byte - watched.started
    return found
