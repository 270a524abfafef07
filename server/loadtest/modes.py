"""How runs are combined: points, a sweep, a search for the capacity, a comparison of servers.

Knows runs and their order; knows nothing about what is printed.
"""

from __future__ import annotations

import secrets
from argparse import Namespace
from dataclasses import replace
from random import Random
from time import perf_counter
from typing import Any

from server.loadtest import capacity
from server.loadtest.api import RefusedError
from server.loadtest.arrivals import Arrivals
from server.loadtest.measure import Figures
from server.loadtest.plan import closed_load, loads_of, open_load
from server.loadtest.report import disturbed
from server.loadtest.run import Load, Server, Settings, run_once

TRIES = 3
SWEEP_RATES = 5
Run = dict[str, Any]


async def quiet_run(server: Server, load: Load, settings: Settings, discard: bool) -> Run:
    """A run; with `discard`, taken again while other processes disturbed it. Raises RefusedError after three."""
    for _ in range(TRIES):
        run = await run_once(server, load, settings)
        if not (discard and disturbed(run)):
            return run
    raise RefusedError(
        f"{load.label}: other processes used over 5 % of the CPU in each of {TRIES} runs; "
        "quiet the machine, or leave out --discard-disturbed"
    )


async def points(servers: list[Server], options: Namespace, settings: Settings) -> dict[str, Any]:
    """Every load on every server, interleaved: in round r the servers take turns from the r-th on.

    The prompts of one load in one round are the same for all servers.
    """
    runs = []
    for number in range(options.repeat):
        turn = number % len(servers)
        for load in loads_of(options, servers[0].filler):
            nonce = options.nonce or (secrets.token_hex(4) if settings.cache == "cold" else "fixed")
            for server in servers[turn:] + servers[:turn]:
                run = await quiet_run(server, load, replace(settings, nonce=nonce), options.discard_disturbed)
                runs.append(run | {"round": number})
    return {"mode": "compare" if len(servers) > 1 else "points", "runs": runs}


async def sweep(server: Server, options: Namespace, settings: Settings) -> dict[str, Any]:
    """One user, then many, then rates spread evenly from what one user gets to what many get."""
    runs = [await run_once(server, closed_load(options, users), settings) for users in (1, options.most_users)]
    slow, fast = (run["rates"]["request_rate"] for run in runs)
    for step in range(1, SWEEP_RATES + 1):
        rate = slow + (fast - slow) * step / SWEEP_RATES
        runs.append(await run_once(server, open_load(options, (rate, rate)), settings))
    return {"mode": "sweep", "runs": runs}


async def find_capacity(server: Server, options: Namespace, settings: Settings) -> dict[str, Any]:
    """The search and the runs it made. Each probe lasts --probe, or as long as the smallest telling sample takes."""
    runs: list[Run] = []
    deadline = perf_counter() + options.budget

    async def probe(rate: float) -> tuple[int, int]:
        count = max(round(rate * options.probe), capacity.enough(options.attain))
        arrivals = Arrivals(rate, rate, options.arrivals)
        offsets = arrivals.offsets(count / rate, Random(f"{options.seed}:{len(runs)}"))
        load = Load(f"rate {rate:.3g}/s", offsets=offsets, rate=rate, seconds=count / rate)
        run = await run_once(server, load, settings, stop=lambda figures: over(figures, options.attain))
        runs.append(run)
        return round(run["rates"]["attainment"] * run["requests"]["sent"]), run["requests"]["sent"]

    found = await capacity.find(probe, options.start_rate, options.attain, lambda: perf_counter() > deadline)
    return {"mode": "capacity", "runs": runs, "capacity": found | {"slo": options.slo.text}}


def over(figures: Figures, attain: float) -> bool:
    return capacity.hopeless(figures.good, figures.sent, attain)
