"""What HTTP costs a token: python -m server.measure.token_cost [MODEL] [--streams 1,8,32] [--tokens 400] [--step-ms 9].

A real server whose engine does everything but the forward, during which it sleeps: what CPU time is left belongs to the
way of a token from the scheduler to the socket. Knows processes and their clocks; MODEL is read for its tokenizer only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from server.client import EngineClient
from server.config import ServeConfig
from server.engine.facts import EngineConfig
from server.loadtest.options import parse_users, positive

ROUNDS = 5
MESSAGES = [{"role": "user", "content": "Tell me a story"}]


def run_paced(step_seconds: float, connection: Connection, config: EngineConfig) -> None:
    """Entry of the engine process."""
    from server.measure.phases import run_asleep

    run_asleep(connection, step_seconds)


def serve_paced(model: str | None, step_seconds: float) -> int:
    from server.serve import serve

    make_client = partial(EngineClient, engine_main=partial(run_paced, step_seconds))
    return serve(ServeConfig(model=model, port=0), make_client)


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    pid: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the HTTP process, and of the engine's."""
        return cpu_seconds(self.pid), sum(map(cpu_seconds, children(self.pid)))

    def stream(self, tokens: int) -> None:
        connection = HTTPConnection(self.host)
        body = {"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while response.read1():
            pass
        connection.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of another process: its POSIX clock, as clock_getcpuclockid makes it."""
    return time.clock_gettime(~pid << 3 | 2)


def children(pid: int) -> list[int]:
    stats = (stat.read_text().rpartition(")") for stat in Path("/proc").glob("[0-9]*/stat"))
    return [int(head.split()[0]) for head, _, rest in stats if int(rest.split()[1]) == pid]


@contextmanager
def running(model: str | None, step_seconds: float) -> Iterator[Server]:
    command = [sys.executable, "-m", "server.measure.token_cost", *([model] if model else []), "--serve"]
    process = subprocess.Popen([*command, "--step-ms", str(step_seconds * 1e3)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := re.search(r"ready at (\S+)", line))), None)
        if ready is None:
            sys.exit(process.wait())  # it has said why
        yield Server(urlsplit(ready[1]).netloc, process.pid)
    finally:
        process.terminate()
        process.wait()


def measure(server: Server, streams: int, tokens: int) -> tuple[float, float]:
    """Milliseconds of CPU a token, HTTP and engine. What a request costs by itself is left out."""
    requests, whole = spent(server, streams, 1), spent(server, streams, 1 + tokens)
    http, engine = (more - less for more, less in zip(whole, requests, strict=True))
    return http / streams / tokens * 1e3, engine / streams / tokens * 1e3


def spent(server: Server, streams: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of so many streams at once, HTTP and engine."""
    before = server.cpu_seconds()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(server.stream, [tokens] * streams))
    http, engine = (now - then for now, then in zip(server.cpu_seconds(), before, strict=True))
    return http, engine


def shown(process: str, token_ms: float, streams: int) -> str:
    """Most of what a step costs is waking up with cold caches, however many streams share it."""
    return f"{process} process {token_ms:.3f} a token, {token_ms * streams:.2f} a step"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.measure.token_cost", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, model file or hub id; the demo model if left out")
    parser.add_argument("--streams", type=parse_users, default="1,8,32")
    parser.add_argument("--tokens", type=positive, default=400)
    parser.add_argument("--step-ms", type=float, default=9.0, help="time of a forward")
    parser.add_argument("--serve", action="store_true", help="only serve, for a client of your own")
    given = parser.parse_args()
    if given.serve:
        return serve_paced(given.model, given.step_ms / 1e3)
    print(f"ms of CPU, median of {ROUNDS} times {given.tokens} tokens, a step every {given.step_ms:g} ms")
    with running(given.model, given.step_ms / 1e3) as server:
        server.stream(5)
        for streams in given.streams:
            rounds = [measure(server, streams, given.tokens) for _ in range(ROUNDS)]
            http, engine = (median(side) for side in zip(*rounds, strict=True))
            print(
                f"{streams:>3} streams: {shown('HTTP', http, streams)}; {shown('engine', engine, streams)}", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
