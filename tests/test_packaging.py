"""What a newcomer does: `make demo` in a checkout, and the wheel in a clean environment far from it.

Real commands and real installs; it knows nothing of the parts behind them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready after {seconds} s:\n{log.read_text()}")


def serve(command: list[str], cwd: Path, port: int, log: Path, **env: str) -> subprocess.Popen[bytes]:
    settings = os.environ | {"ROPEWAY_PORT": str(port)} | env
    settings.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=cwd, env=settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> int:
    os.killpg(process.pid, signal.SIGTERM)
    return process.wait(60)


def streamed_text(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_make_demo_answers_with_the_curl_line_it_prints(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "demo.log"
    process = serve(["make", "demo"], REPOSITORY, port, log, ROPEWAY_CACHE=str(tmp_path / "cache"))
    try:
        wait_ready(process, port, log, seconds=900)
        line = re.search(r"^\s*(curl .*)$", log.read_text(), re.MULTILINE)
        assert line, log.read_text()
        answer = subprocess.run(shlex.split(line[1]), capture_output=True, text=True, check=True, timeout=120)
        assert "Paris" in streamed_text(answer.stdout), answer.stdout
        assert answer.stdout.rstrip().endswith("data: [DONE]")
    finally:
        end(process)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_serves_away_from_the_checkout(wheel: Path, tmp_path: Path, tiny_model: object) -> None:
    assert callable(tiny_model)
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "torch>=2.11,<2.14"], check=True)
    subprocess.run([*pip, str(wheel)], check=True)
    port, log, away = free_port(), tmp_path / "serve.log", tmp_path / "away"
    away.mkdir()
    process = serve([str(home / "bin" / "ropeway"), "serve", str(tiny_model())], away, port, log)
    try:
        wait_ready(process, port, log, seconds=120)
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
    finally:
        assert end(process) == 0
