"""A `ropeway serve` process of a test: start it, wait for it, read what it printed, stop it.

Knows no model and no API.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class LiveServer:
    """A `ropeway serve` process, and what it printed."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_ready(self, seconds: float = 120) -> None:
        """Poll /readyz; a process that ended instead fails the test with its own output."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"server ended with {self.process.returncode}:\n{self.output}"
            if self.is_ready():
                return
            time.sleep(0.05)
        raise AssertionError(f"server not ready after {seconds} s:\n{self.output}")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, seconds: float = 20) -> int:
        """SIGTERM; returns the exit code. A server that does not end is killed and fails the test."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"server did not stop within {seconds} s:\n{self.output}") from None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_server(model: Path, log: Path, *args: str, env: dict[str, str] | None = None) -> LiveServer:
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", str(model), "--port", str(port), *args]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWAY_")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=settings | (env or {})
        )
    return LiveServer(process, f"http://127.0.0.1:{port}", log)
