"""A server as a process: start, readiness, deaths, disconnects, slow readers, keys, drain and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import LiveServer
from tests.scripted_engine import CRASH, KILL, SILENT, SILENT_IS_IN
from tests.scripted_server import launch

Launch = Callable[..., LiveServer]
ENDLESS = {"prompt": "abc", "max_tokens": 10**6, "ignore_eos": True}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HUGE_CONTEXT = ("--max-model-len", "2000000")


@pytest.fixture
def server(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Launch]:
    """server(*flags, wait=True) -> a scripted server of this test alone."""
    started: list[LiveServer] = []

    def start(*flags: str, wait: bool = True, model: Path | None = None) -> LiveServer:
        live = launch(model or tiny_model(), tmp_path / f"{len(started)}.log", *flags)
        started.append(live)
        if wait:
            live.wait_ready()
        return live

    yield start
    for live in started:
        if live.process.poll() is None:
            live.process.kill()
        live.process.wait()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def metric(live: LiveServer, name: str, **labels: str) -> float:
    """The one sample with this name and these labels."""
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    wanted = [
        line for line in lines if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    [line] = wanted
    return float(line.rsplit(" ", 1)[1])


def running(live: LiveServer) -> float:
    return metric(live, "vllm:num_requests_running")


@contextmanager
def raw_request(live: LiveServer, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request by hand, so that the test decides when the socket is read and closed."""
    host, port = live.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = HEAD + f"Content-Length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # full soon, when the test does not read
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + content)
        yield connection


def engine_pids(live: LiveServer) -> list[int]:
    children = Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# ---- coming up


def test_the_port_answers_while_the_model_loads(
    server: Launch, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    slow = tmp_path / "slow"  # the scripted engine loads it until the file "go" is there
    shutil.copytree(tiny_model(), slow)
    live = server(wait=False, model=slow)

    def answers(path: str) -> int:
        try:
            return httpx.get(f"{live.url}{path}").status_code
        except httpx.TransportError:
            return 0

    until(lambda: answers("/livez") == 200)
    assert (answers("/startupz"), answers("/readyz")) == (503, 503)
    assert set(httpx.get(f"{live.url}/startupz").json()) == {"phase", "detail", "elapsed_s"}
    refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    (slow / "go").touch()
    until(lambda: answers("/readyz") == 200)
    assert (answers("/startupz"), answers("/health")) == (200, 200)


def test_start_prints_bytes_invariance_and_a_line_to_try(server: Launch) -> None:
    live = server("--served-model-name", "my-model")
    until(lambda: "curl" in live.output)
    assert "predicted" in live.output and "allocated" in live.output and "resident" in live.output
    assert "batch invariance on" in live.output
    [line] = [line for line in live.output.splitlines() if line.startswith("curl ")]
    assert live.url in line and "my-model" in line


def test_a_taken_port_is_one_line_and_exit_1(server: Launch) -> None:
    first = server()
    second = server("--port", first.url.rsplit(":", 1)[1], wait=False)
    assert second.process.wait(30) == 1
    assert second.output.splitlines() == [
        f"ropeway: cannot listen on {first.url.removeprefix('http://')}: Address already in use; choose another --port"
    ]


@pytest.mark.parametrize(("name", "text"), [("crash", "no such checkpoint"), ("die", "exit code 7")])
def test_an_engine_that_fails_at_start_is_one_line_and_exit_1(
    server: Launch, tiny_model: Callable[..., Path], tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / name
    folder.symlink_to(tiny_model())
    live = server(wait=False, model=folder)
    assert live.process.wait(30) == 1
    failure = [line for line in live.output.splitlines() if not line.startswith("ropeway: listening")]
    assert len(failure) == 1 and failure[0].startswith("ropeway: ") and text in failure[0]


def test_no_model_there_is_one_line_and_exit_1(server: Launch, tmp_path: Path) -> None:
    live = server(wait=False, model=tmp_path / "nothing")
    assert live.process.wait(30) == 1
    assert "no model at" in live.output and "Traceback" not in live.output


# ---- the engine dies


@pytest.mark.parametrize(("seed", "text"), [(KILL, "exit code 9"), (CRASH, "told to crash")])
def test_a_death_ends_streams_with_an_error_and_the_server_with_1(server: Launch, seed: int, text: str) -> None:
    live = server()
    with ThreadPoolExecutor() as pool:
        silent = pool.submit(httpx.post, f"{live.url}/v1/completions", json={"prompt": "a", "seed": SILENT}, timeout=30)
        until(lambda: SILENT_IS_IN in live.output)
        response = httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc", "seed": seed, "stream": True})
        assert text in response.text and response.text.endswith("data: [DONE]\n\n")
        assert silent.result().status_code == 500
    assert live.process.wait(20) == 1
    assert text in live.output and "Traceback" not in live.output


@pytest.mark.fault
def test_kill_9_of_the_engine(server: Launch) -> None:
    live = server(*HUGE_CONTEXT)
    with httpx.stream("POST", f"{live.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        [pid] = engine_pids(live)
        os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert any("SIGKILL" in line for line in rest) and rest[-2] == "data: [DONE]"
    assert live.process.wait(20) == 1


# ---- the client goes


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.fault
def test_a_client_that_leaves_while_it_decodes(server: Launch, stream: bool) -> None:
    live = server(*HUGE_CONTEXT)
    with raw_request(live, ENDLESS | {"stream": stream}) as connection:
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: running(live) == 1)
    until(lambda: metric(live, "vllm:request_success_total", finished_reason="abort") == 1)
    until(lambda: running(live) == 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.fault
def test_a_client_that_leaves_before_its_first_token(server: Launch, stream: bool) -> None:
    live = server()
    with raw_request(live, {"prompt": "abc", "seed": SILENT, "stream": stream}):
        # the silent request is in once a second one, sent after it, has been answered
        httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc"})
        assert metric(live, "vllm:request_success_total", finished_reason="abort") == 0
    until(lambda: metric(live, "vllm:request_success_total", finished_reason="abort") == 1)


@pytest.mark.fault
def test_a_client_that_leaves_while_its_prompt_is_tokenised(server: Launch) -> None:
    live = server(*HUGE_CONTEXT)
    with raw_request(live, {"prompt": "word " * 100_000, "max_tokens": 100_000}):
        pass
    until(lambda: running(live) == 0)
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc"}).status_code == 200
    until(lambda: running(live) == 0)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fault
def test_a_slow_reader_is_cut_off_in_bounded_memory(server: Launch) -> None:
    live = server("--slow-reader-timeout", "1", *HUGE_CONTEXT)
    before = resident(live.process.pid)
    with raw_request(live, ENDLESS | {"stream": True, "logprobs": 20}) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: metric(live, "vllm:request_success_total", finished_reason="abort") == 1, 40)
    assert resident(live.process.pid) - before < 32 * 1024**2
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert "Traceback" not in live.output


# ---- limits


@pytest.mark.fault
def test_a_full_queue_is_429_with_retry_after(server: Launch) -> None:
    live = server("--max-num-seqs", "1", "--max-queue", "1")
    silent = {"prompt": "a", "seed": SILENT, "timeout": 8, "max_tokens": 1}
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(httpx.post, f"{live.url}/v1/completions", json=silent, timeout=30) for _ in range(2)]
        until(lambda: live.output.count(SILENT_IS_IN) == 2)
        whole = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        assert whole.status_code == 429
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "stream": True})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in held] == [200, 200]
    assert metric(live, "ropeway_requests_rejected_total", status="429") >= 2


@pytest.mark.fault
def test_body_limits(server: Launch) -> None:
    live = server("--max-body-bytes", "10000", "--body-timeout", "0.5")

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 5000

    large = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a" * 10_000})
    assert large.status_code == 413 and "10000" in large.json()["error"]["message"]
    headers = {"Content-Type": "application/json"}
    with contextlib.suppress(httpx.TransportError):  # cut while it was still sending
        assert httpx.post(f"{live.url}/v1/completions", content=endless(), headers=headers).status_code == 413
    with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))) as slow:
        slow.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{".encode())
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_keys(server: Launch) -> None:
    live = server("--api-key", "secret", "--api-key", "other")

    def status(path: str, method: str = "GET", **headers: str) -> int:
        return httpx.request(method, live.url + path, headers=headers).status_code

    for path in (
        "/v1/models",
        "//v1/models",
        "/v1/../v1/models",
        "/v1/models/",
        "/V1/MODELS",
        "/nope",
        "/openapi.json",
    ):
        assert status(path) == 401, path
        assert status(path, Authorization="Bearer secre") == 401
        assert status(path, Authorization="Bearer secret1") == 401
        assert status(path, Authorization="Basic secret") == 401
        assert status(path, "HEAD") == 401
    for headers in ({"Authorization": "Bearer secret"}, {"Authorization": "bearer other"}, {"X-Api-Key": "secret"}):
        assert status("/v1/models", **headers) == 200
    assert httpx.get(f"{live.url}/v1/models", headers=[(b"X-Api-Key", "sécret".encode())]).status_code == 401
    for path in ("/health", "/livez", "/readyz", "/startupz", "/metrics"):
        assert status(path) == 200
    assert "secret" not in httpx.get(f"{live.url}/metrics").text


def test_strict_params(server: Launch) -> None:
    live = server("--strict-params")
    refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "frobnicate": 1})
    assert refused.status_code == 400 and "frobnicate" in refused.text


@pytest.mark.fault
def test_a_silent_engine_is_not_ready(server: Launch) -> None:
    live = server("--stall-timeout", "1")
    with raw_request(live, {"prompt": "abc", "seed": SILENT}):
        until(lambda: httpx.get(f"{live.url}/readyz").status_code == 503)
        assert httpx.get(f"{live.url}/livez").status_code == 200
    until(lambda: httpx.get(f"{live.url}/readyz").status_code == 200)


# ---- going down


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("used", [False, True])
def test_an_idle_server_ends_soon_and_leaves_nothing(server: Launch, sig: int, used: bool) -> None:
    live = server()
    with httpx.Client() as kept_alive:
        if used:
            assert kept_alive.post(f"{live.url}/v1/completions", json={"prompt": "abc"}).status_code == 200
        [engine] = engine_pids(live)
        live.process.send_signal(sig)
        assert live.process.wait(3) == 0
    assert not Path(f"/proc/{engine}").exists()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(live.url.rsplit(":", 1)[1])))
    assert "Traceback" not in live.output


def test_a_drain_lets_streams_finish_and_refuses_new_work(server: Launch) -> None:
    live = server("--max-model-len", "200000")
    body = {"prompt": "abc", "max_tokens": 20_000, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        live.process.terminate()
        until(lambda: httpx.get(f"{live.url}/readyz").status_code == 503)
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert httpx.get(f"{live.url}/livez").status_code == 200
        rest = [line for line in lines if line]
    assert '"finish_reason":"length"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert live.process.wait(10) == 0


@pytest.mark.fault
def test_at_the_drain_deadline_streams_get_an_error_event(server: Launch) -> None:
    live = server("--drain-timeout", "0.5", *HUGE_CONTEXT)
    with httpx.stream("POST", f"{live.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        live.process.terminate()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "drain" and rest[-1] == "data: [DONE]"
    assert live.process.wait(10) == 0
    assert "Traceback" not in live.output


def test_a_second_signal_ends_at_once(server: Launch) -> None:
    live = server("--drain-timeout", "1000", *HUGE_CONTEXT)
    with httpx.stream("POST", f"{live.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        live.process.terminate()
        until(lambda: "finishing 1 open request" in live.output)
        live.process.terminate()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "drain" and rest[-1] == "data: [DONE]"
    assert live.process.wait(10) == 0
    assert "Traceback" not in live.output


def test_a_signal_while_loading(server: Launch) -> None:
    live = server(wait=False)

    def listens() -> bool:
        try:
            return httpx.get(f"{live.url}/livez").status_code == 200
        except httpx.TransportError:
            return False

    until(listens)
    live.process.terminate()
    assert live.process.wait(5) == 0
    assert "Traceback" not in live.output


# ---- which process holds what


def test_the_http_process_holds_no_tensors_and_the_engine_no_web_server(server: Launch) -> None:
    live = server()
    [engine] = engine_pids(live)
    maps = Path(f"/proc/{live.process.pid}/maps").read_text()
    assert "torch" not in maps and "tokenizers" in maps
    assert "tokenizers" not in Path(f"/proc/{engine}/maps").read_text()
