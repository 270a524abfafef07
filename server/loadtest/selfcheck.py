"""How true this client's figures are on this machine: it measures the mock server and compares with the mock's own log.

Knows no real server. Run `python -m server.loadtest.selfcheck`.
By default 1,000 streams of 5 events a second, one process for each side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from time import perf_counter
from typing import Any

from server.loadtest.__main__ import event_loop
from server.loadtest.api import Api
from server.loadtest.http import HttpClient
from server.loadtest.lengths import parse_length
from server.loadtest.measure import Distribution
from server.loadtest.report import milliseconds, percent, table
from server.loadtest.run import Load, Server, Settings, run_once
from server.loadtest.workload import Filler, Shape, synthetic

COLUMNS = ("mean", "p50", "p90", "p99", "max")


def start_mock(options: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "server.loadtest.mock", "--port", "0", "--log", str(log), "--ttft", "0.2"]
    mock = subprocess.Popen([*command, "--gap", str(options.gap)], stdout=subprocess.PIPE, text=True)
    assert mock.stdout is not None
    return mock, mock.stdout.readline().split()[-1]


async def measure(options: argparse.Namespace, url: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    client = HttpClient(url, perf_counter)
    server = Server("", url, client, Api("completions", "mock"), Filler("words"), [client.port])
    shape = Shape(parse_length("32"), parse_length(str(round(options.seconds / options.gap))))
    settings = Settings(
        lambda filler, seed: synthetic(shape, filler, seed), sharing=False, warmup=0, sink=rows.append, quiet=True
    )
    spread = array("d", (index / options.streams for index in range(options.streams)))
    return await run_once(server, Load("streams", offsets=spread, rate=options.streams, seconds=1.0), settings)


def lateness(rows: list[dict[str, Any]], log: Path) -> Distribution:
    """Seconds from the mock's send of each chunk to this client's stamp on it."""
    sent = {entry["id"]: entry["chunk_times"] for entry in map(json.loads, log.read_text().splitlines())}
    late = Distribution()
    for row in rows:
        for seen, at in zip(row["chunk_times"], sent[f"bench-{row['index']}"], strict=True):
            late.add(max(0.0, row["intended"] + seen - at))
    return late


def against_log(run: dict[str, Any], log: Path) -> list[list[str]]:
    """TTFT and chunk gap: measured beside what the log says."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    ttft, gap = Distribution(), Distribution()
    for entry in entries:
        ttft.add(entry["chunk_times"][0] - entry["received"])
        for before, after in zip(entry["chunk_times"], entry["chunk_times"][1:], strict=False):
            gap.add(after - before)
    rows = []
    for name, held in (("ttft", ttft), ("chunk_gap", gap)):
        logged = {"mean": held.mean(), **held.quantiles({"p50": 0.5, "p90": 0.9, "p99": 0.99}), "max": held.most}
        rows.append([f"{name} measured", *(milliseconds(run["latency"][name][column]) for column in COLUMNS)])
        rows.append([f"{name} as sent", *(milliseconds(logged[column]) for column in COLUMNS)])
    return rows


def columns(held: dict[str, float]) -> list[str]:
    return [milliseconds(held[column]) for column in COLUMNS]


def main(argv: list[str]) -> int:
    """Exit code 1 where the p99 of the lag is above 10 ms."""
    parser = argparse.ArgumentParser(prog="python -m server.loadtest.selfcheck", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between events of a stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a stream")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log, rows = Path(folder) / "log.jsonl", list[dict[str, Any]]()
        mock, url = start_mock(options, log)
        try:
            with asyncio.Runner(loop_factory=event_loop) as runner:
                run = runner.run(measure(options, url, rows))
        finally:
            mock.terminate()
            mock.wait()
        late = lateness(rows, log)
        rows_of_table = against_log(run, log)
    quantiles = {"mean": late.mean(), **late.quantiles({"p50": 0.5, "p90": 0.9, "p99": 0.99}), "max": late.most}
    requests, machine = run["requests"], run["machine"]
    print(
        f"{requests['ok']} of {requests['sent']} streams ok, {late.count} events; client "
        f"{percent(machine['client_core'])} of a core, other processes {percent(machine['others'])} of the CPU"
    )
    lags = [
        ["event stamped - sent", *columns(quantiles)],
        ["send lag", *columns(run["send_lag"])],
        ["loop lag", *columns(run["client"]["loop_lag"])],
    ]
    print(table([["ms", *COLUMNS], *lags, *rows_of_table]))
    return 0 if quantiles["p99"] < 0.010 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
