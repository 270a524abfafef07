"""Where the time of a start goes: python -m server.measure.start_time [MODEL] [--rounds 5] [--cold] [serve's options].

Starts `ropeway serve`, asks for a chat's first token as soon as the server is ready, ends it, and again. Knows
processes and HTTP only; the phases are those that the server itself shows in /metrics. The very first start of a
machine, which compiles the kernels and converts the model, is --cold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse
from statistics import median
from urllib.parse import urlsplit

from server.loadtest.options import positive

PHASE = re.compile(r'^ropeway_startup_seconds\{.*phase="(\w+)"\} (\S+)', re.MULTILINE)
POLL_SECONDS = 0.02
BODY = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1}


def request(host: str, path: str, body: object = None) -> HTTPResponse:
    connection = HTTPConnection(host)
    text = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
    return connection.getresponse()


def is_ready(host: str) -> bool:
    try:
        return request(host, "/readyz").status == 200
    except (ConnectionError, HTTPException):  # it is ending
        return False


def start(arguments: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the command to each event, and the seconds that the server's phases took.

    SystemExit where the server ends instead: it has said why.
    """
    begun = time.monotonic()
    command = [sys.executable, "-m", "server", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        listening = re.search(r"listening on ([^,]+),", process.stdout.readline())
        if listening is None:
            sys.exit(process.wait())
        host = urlsplit(listening[1]).netloc
        times = {"listening": time.monotonic() - begun}
        while not is_ready(host):
            if process.poll() is not None:
                sys.exit(process.returncode)
            time.sleep(POLL_SECONDS)
        times["ready"] = time.monotonic() - begun
        answer = request(host, "/v1/chat/completions", BODY)
        assert answer.status == 200, answer.read()
        times["first answer"] = time.monotonic() - begun
        phases = PHASE.findall(request(host, "/metrics").read().decode())
        return times | {f"  {name}": float(seconds) for name, seconds in phases}
    finally:
        process.terminate()
        process.communicate()


def cold_start(arguments: list[str]) -> dict[str, float]:
    """A start that finds nothing that an earlier one has made."""
    with tempfile.TemporaryDirectory() as cache:
        return start(arguments, {"ROPEWAY_CACHE": cache})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.measure.start_time", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--cold", action="store_true", help="every start with an empty cache")
    given, arguments = parser.parse_known_args()
    rounds = [cold_start(arguments) if given.cold else start(arguments, {}) for _ in range(given.rounds)]
    kind = "starts with an empty cache" if given.cold else "starts"
    print(f"seconds from the command, median of {given.rounds} {kind}")
    for name in rounds[0]:
        print(f"{name:<14}{median(times[name] for times in rounds):>7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
