"""Does the load generator grow? `python -m server.loadtest.client_soak --minutes 60`: 0 flat, 1 it grows or fails.

A real `ropeway bench` against the mock server, its memory read from /proc all along. Short replies, so that within the
first third the distributions have left their exact part, which may grow. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.loadtest.soak import MIB, WARM_UP, Slope, private_bytes, slope

SAMPLES = 60
TOLERANCE = 2 * MIB


@contextmanager
def mock() -> Iterator[str]:
    command = [sys.executable, "-m", "server.loadtest.mock", "--port", "0", "--ttft", "0.02", "--gap", "0.005"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


def watched(command: list[str], every: float) -> tuple[int, list[tuple[float, int]]]:
    """Exit code, and (seconds, bytes) of the process every `every` seconds until it ends."""
    samples, begun = list[tuple[float, int]](), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while True:
            try:
                return process.wait(every), samples
            except subprocess.TimeoutExpired:
                samples.append((time.monotonic() - begun, private_bytes(process.pid)))


def after_warm_up(samples: list[tuple[float, int]]) -> Slope:
    seconds, held = zip(*samples[int(len(samples) * WARM_UP) :], strict=True)
    return slope(seconds, held)


def table(samples: list[tuple[float, int]]) -> str:
    every = max(1, len(samples) // 12)
    rows = [f"{seconds:>8.0f} {held / MIB:>8.2f}" for seconds, held in [*samples[:-1][::every], samples[-1]]]
    return "\n".join([f"{'seconds':>8} {'MiB':>8}", *rows])


def main(argv: list[str]) -> int:
    """Runs for as long as asked and prints the memory, its slope and how many requests were measured."""
    parser = argparse.ArgumentParser(prog="python -m server.loadtest.client_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--users", type=int, default=16, help="streams at once (default 16)")
    options = parser.parse_args(argv)
    seconds = options.minutes * 60
    with mock() as url, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        load = ["--concurrency", str(options.users), "--duration", f"{seconds}s", "--warmup", "0", "--max-lag", "1h"]
        work = ["--input-len", "16", "--output-len", "8", "--requests", f"{folder}/requests.jsonl"]
        command = [sys.executable, "-m", "server", "bench", url, *load, *work, "--quiet", "--json", str(out)]
        code, samples = watched(command, seconds / SAMPLES)
        requests = json.loads(out.read_text())["runs"][0]["requests"] if code == 0 else {}
    line = after_warm_up(samples)
    grows = line.exceeds(TOLERANCE)
    print(table(samples))
    print(
        f"{requests.get('ok', 0)} of {requests.get('sent', 0)} requests ok, exit code {code}; "
        f"{line.rate * 3600 / MIB:+.2f} +- {line.error * 3600 / MIB:.2f} MiB/hour after warm-up "
        f"({line.growth / MIB:+.2f} MiB in this run): {'GROWS' if grows else 'flat'}"
    )
    return int(grows or code != 0 or requests["ok"] < requests["sent"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
