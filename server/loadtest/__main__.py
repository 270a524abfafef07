"""The `ropeway bench` command: reads the options, probes the servers, runs what was asked, writes the reports.

Knows the modes; the work is done elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from server.loadtest import options as command_line
from server.loadtest.api import Api, RefusedError, calibrated, first_model, settled
from server.loadtest.http import HttpClient, HttpError
from server.loadtest.plan import loads_of, work_of
from server.loadtest.report import as_json, text, write_csv
from server.loadtest.run import Server, Settings, run_once
from server.loadtest.workload import Filler


async def probe(name: str, url: str, options: Namespace) -> Server:
    """Ask the server what it serves and how long its words are. Raises RefusedError or HttpError."""
    client = HttpClient(url, perf_counter, options.api_key)
    model = options.model or await first_model(client)
    api = Api(options.api, model, not options.stop_early, extra=options.extra_body)
    api = await settled(client, api)
    filler = Filler("ids", low=options.token_ids[0], high=options.token_ids[1])
    if options.prompts != "ids":
        filler = await calibrated(client, api)
    local = client.host in ("127.0.0.1", "localhost", "::1")
    return Server(name, url, client, api, filler, [client.port] if local else [])


def settings_of(options: Namespace, sink: Any) -> Settings:
    return Settings(
        work_of(options),
        sharing=bool(options.shared_prefix or options.trace or options.turns > 1),
        cache=options.cache,
        distinct=options.distinct,
        seed=options.seed,
        slo=options.slo,
        timeout=options.timeout,
        max_lag=options.max_lag,
        max_in_flight=options.max_in_flight,
        warmup=options.warmup,
        kv_bytes_per_token=options.kv_bytes_per_token,
        sink=sink,
        quiet=options.quiet,
    )


async def measure(options: Namespace, settings: Settings) -> dict[str, Any]:
    """The result of the mode that was asked for."""
    server = await probe("", options.url, options)
    runs = []
    for _ in range(options.repeat):
        for load in loads_of(options, server.filler):
            runs.append(await run_once(server, load, settings))
    return {"mode": "points", "runs": runs}


def write(options: Namespace, result: dict[str, Any]) -> None:
    if options.json and str(options.json) != "-":
        options.json.write_text(as_json(result), encoding="utf-8")
    if options.csv:
        write_csv(options.csv, result["runs"])
    if options.markdown:
        options.markdown.write_text(text(result["runs"], markdown=True), encoding="utf-8")


def verdict(result: dict[str, Any]) -> int:
    runs = result["runs"]
    failed = not any(run["requests"]["ok"] for run in runs)
    return 1 if failed or any(run["client"]["limited"] for run in runs) else 0


def main(argv: list[str]) -> int:
    """Exit code: 0 measured, 1 refused, failed or limited by the client, 2 wrong usage."""
    try:
        options = command_line.parse(argv)
    except SystemExit as end:
        return int(end.code or 0)
    with ExitStack() as stack:
        sink = None
        if options.requests:
            file = stack.enter_context(options.requests.open("w", encoding="utf-8"))
            sink = lambda row: print(json.dumps(row), file=file)  # noqa: E731
        try:
            result = asyncio.run(measure(options, settings_of(options, sink)))
        except (RefusedError, HttpError, ValueError, OSError) as error:
            print(f"ropeway bench: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("ropeway bench: interrupted", file=sys.stderr)
            return 1
    write(options, result)
    print(as_json(result) if str(options.json) == "-" else text(result["runs"]), end="")
    return verdict(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
