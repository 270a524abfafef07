"""What stands before the routes of a real server: keys of a file, origins, TLS, slow senders, logs and traces."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServeConfig, with_keys_of
from tests.conftest import LiveServer
from tests.scripted_server import launch

KEY = {"Authorization": "Bearer beta-key"}
SECRET = "the words of the prompt"


class Collector(ThreadingHTTPServer):
    """An OTLP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                self.bodies.append(handler.rfile.read(int(handler.headers["content-length"])))
                handler.send_response(200)
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(handler, format: str, *args: Any) -> None:  # noqa: N805
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def live(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[LiveServer]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    folder = tmp_path_factory.mktemp("gate")
    (folder / "keys").write_text("alpha-key\n\n# who is gone\nbeta-key  # a note\n")
    server = launch(
        tiny_model(),
        folder / "server.log",
        *("--api-key-file", str(folder / "keys"), "--cors-allow-origin", "https://app.example"),
        *("--header-timeout", "0.5", "--body-timeout", "0.5", "--keep-alive-timeout", "1", "--log-format", "json"),
        *("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"),
    )
    server.wait_ready()
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0


def complete(live: LiveServer, **headers: str) -> httpx.Response:
    body = {"prompt": SECRET, "max_tokens": 5}
    return httpx.post(f"{live.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_keys_of_a_file(live: LiveServer) -> None:
    for key in ("alpha-key", "beta-key"):
        assert complete(live, **{"x-api-key": key}).status_code == 200
    for key in ("gamma-key", "beta-ke", "beta-key  # a note", "# who is gone", ""):
        assert complete(live, **{"x-api-key": key}).status_code == 401
    assert httpx.get(f"{live.url}/openapi.json").status_code == 401
    assert httpx.get(f"{live.url}/readyz").status_code == 200


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="no key in it"):
        with_keys_of(ServeConfig(), tmp_path / "keys")
    with pytest.raises(ValueError, match="No such file"):
        with_keys_of(ServeConfig(), tmp_path / "absent")


def test_pages_of_allowed_origins_may_call(live: LiveServer) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx.options(f"{live.url}/v1/completions", headers={"Origin": "https://app.example"} | asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in preflight.headers
    answer = complete(live, Origin="https://app.example", **KEY)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    refused = complete(live, Origin="https://app.example")
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers, "a page can read why"
    other = httpx.options(f"{live.url}/v1/completions", headers={"Origin": "https://other.example"} | asks)
    assert "access-control-allow-origin" not in other.headers


def test_an_idle_connection_is_closed_when_its_time_is_over(live: LiveServer) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /readyz HTTP/1.1\r\nHost: x\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: alpha-key\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a second head", "half a body"],
)
def test_slow_senders_are_cut_while_others_are_served(live: LiveServer, start: bytes) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(start)
        assert complete(live, **KEY).status_code == 200
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass  # until the server closes


def test_log_lines_are_json_without_texts(live: LiveServer) -> None:
    answer = complete(live, **KEY, **{"X-Request-Id": "find-me"})
    assert answer.status_code == 200
    deadline = time.monotonic() + 20
    while "find-me" not in live.output:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lines = [json.loads(line) for line in live.output.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line.get("request_id") == "find-me"]
    assert line["path"] == "/v1/completions" and line["status"] == 200 and line["finish"] == ["length"]
    assert line["usage"]["completion_tokens"] == 5 and line["tenant"].startswith("key-")
    assert SECRET not in live.output and "beta-key" not in live.output


def test_a_request_becomes_a_span_of_its_callers_trace(live: LiveServer, collector: Collector) -> None:
    """Ends its server, which sends what waits."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    assert complete(live, **KEY, traceparent=f"00-{trace}-{parent}-01").status_code == 200
    assert live.stop() == 0
    requests = [ExportTraceServiceRequest.FromString(body) for body in collector.bodies]
    spans = [s for r in requests for group in r.resource_spans for scope in group.scope_spans for s in scope.spans]
    [span] = [span for span in spans if span.trace_id.hex() == trace]
    assert span.parent_span_id.hex() == parent and span.name.startswith("text_completion ")
    attributes = {item.key: item.value for item in span.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.request.max_tokens"].int_value == 5
    assert attributes["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano


def test_https_and_a_log_with_prompts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    flags = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--log-format", "json", "--log-prompts")
    live = launch(tiny_model(), tmp_path / "server.log", *flags)
    try:
        url = live.url.replace("http:", "https:")
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(cert))) as client:
            while not is_up(client):
                assert time.monotonic() < deadline, live.output
            body = {"prompt": SECRET, "max_tokens": 3}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert f"listening on {url}" in live.output
        assert live.stop() == 0 and SECRET in live.output
    finally:
        live.process.kill()
        live.process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
