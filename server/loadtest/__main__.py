"""The `ropeway bench` command: reads the options, probes the servers, runs what was asked, writes the reports.

Knows the modes by name and nothing of how they work.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from server.loadtest import compare, html, modes, options, report
from server.loadtest.api import Api, RefusedError, calibrated, first_model, settled
from server.loadtest.http import HttpClient, HttpError
from server.loadtest.plan import save_trace, work_of
from server.loadtest.run import Server, Settings
from server.loadtest.workload import Filler

Result = dict[str, Any]


async def probe(name: str, url: str, chosen: Namespace) -> Server:
    """Ask the server what it serves and how long its words are. Raises RefusedError or HttpError."""
    client = HttpClient(url, perf_counter, chosen.api_key)
    model = chosen.model or await first_model(client)
    api = Api(chosen.api, model, not chosen.stop_early, extra=chosen.extra_body)
    api = await settled(client, api)
    filler = Filler("ids", low=chosen.token_ids[0], high=chosen.token_ids[1])
    if chosen.prompts != "ids":
        filler = await calibrated(client, api)
    local = client.host in ("127.0.0.1", "localhost", "::1")
    return Server(name, url, client, api, filler, [client.port] if local else [])


def settings_of(chosen: Namespace, sink: Callable[[dict[str, Any]], None] | None) -> Settings:
    return Settings(
        work_of(chosen),
        sharing=bool(chosen.shared_prefix or chosen.trace or chosen.turns > 1),
        cache=chosen.cache,
        distinct=chosen.distinct,
        seed=chosen.seed,
        slo=chosen.slo,
        timeout=chosen.timeout,
        max_lag=chosen.max_lag,
        max_in_flight=chosen.max_in_flight,
        warmup=chosen.warmup,
        kv_bytes_per_token=chosen.kv_bytes_per_token,
        sink=sink,
        quiet=chosen.quiet,
    )


async def measure(chosen: Namespace, sink: Callable[[dict[str, Any]], None] | None) -> Result:
    """The result of the mode that was asked for."""
    settings = settings_of(chosen, sink)
    servers = [await probe(name, url, chosen) for name, url in chosen.compare or [("", chosen.url)]]
    try:
        return await combined(servers, chosen, settings)
    finally:
        for server in servers:
            server.client.close()
        await asyncio.sleep(0)  # one turn of the loop, in which closed connections end


async def combined(servers: list[Server], chosen: Namespace, settings: Settings) -> Result:
    if chosen.save_trace:
        chosen.nonce = chosen.nonce or secrets.token_hex(4)
        save_trace(chosen, servers[0].filler)
    if chosen.find_capacity:
        return await modes.find_capacity(servers[0], chosen, settings)
    if chosen.sweep:
        return await modes.sweep(servers[0], chosen, settings)
    result = await modes.points(servers, chosen, settings)
    several = chosen.repeat > 1 or len(servers) > 1
    return result | ({"summary": compare.as_rows(result["runs"])} if several else {})


def text(result: Result, markdown: bool = False) -> str:
    """All tables, the verdict of the mode first."""
    parts = [report.text(result["runs"], markdown)]
    if "summary" in result:
        parts.insert(0, compare.text(result["runs"], markdown))
    if "capacity" in result:
        parts.insert(0, report.capacity(result["capacity"], markdown))
    return "\n".join(parts)


def write(chosen: Namespace, result: Result) -> None:
    """The files that were asked for. Raises OSError."""
    outputs: list[tuple[Path | None, Callable[[], str]]] = [
        (chosen.json, lambda: report.as_json(result)),
        (chosen.markdown, lambda: text(result, markdown=True)),
        (chosen.html, lambda: html.page(result, text(result))),
    ]
    for path, content in outputs:
        if path and str(path) != "-":
            path.write_text(content(), encoding="utf-8")
    if chosen.csv:
        report.write_csv(chosen.csv, result["runs"])
    if chosen.plots:
        from server.loadtest import plots

        plots.draw(chosen.plots, result)


def verdict(result: Result) -> int:
    """1 where nothing was measured, or where this client and not the server set a figure."""
    runs = result["runs"]
    failed = not any(run["requests"]["ok"] for run in runs)
    return 1 if failed or any(run["client"]["limited"] for run in runs) else 0


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed: a quarter less CPU for each event."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def perform(chosen: Namespace) -> Result:
    with ExitStack() as stack:
        sink = None
        if chosen.requests:
            file = stack.enter_context(chosen.requests.open("w", encoding="utf-8"))

            def sink(row: dict[str, Any]) -> None:
                print(json.dumps(row), file=file)

        runner = stack.enter_context(asyncio.Runner(loop_factory=event_loop))
        return runner.run(measure(chosen, sink))


def main(argv: list[str]) -> int:
    """Exit code: 0 measured, 1 refused, failed or limited by the client, 2 wrong usage."""
    try:
        chosen = options.parse(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        if chosen.plots and find_spec("matplotlib") is None:
            raise RefusedError("--plots needs matplotlib: pip install 'ropeway[plot]'")
        result = perform(chosen)
        try:  # files first: a reader of the output that goes away does not cost them, nor they the output
            write(chosen, result)
        finally:
            print(report.as_json(result) if str(chosen.json) == "-" else text(result), end="")
    except (RefusedError, HttpError, ValueError) as error:
        print(f"ropeway bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"what had ended is in {chosen.requests}" if chosen.requests else "--requests FILE keeps what had ended"
        raise KeyboardInterrupt(f"no report is made; {kept}") from None
    return verdict(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
