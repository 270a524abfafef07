"""Does a server leak? `python -m server.loadtest.soak --minutes 60 [MODEL | --url URL]`: 0 flat, 1 it grows or errs.

Rounds of random traffic (short, long, shared prefixes, choices, hang-ups, deadlines, bad requests); after each the
server must be idle with its books in balance, and RssAnon + VmSwap of its processes are read. Knows only HTTP and
/proc. What the KV cache has touched of its pool is no leak and is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import httpx

from server.loadtest.machine import server_pids
from server.loadtest.words import WORDS

MIB = 1 << 20
SERVE_FLAGS = ("--port", "0", "--max-queue", "16", "--kv-cache-memory")
"""Of the server that is started here. With a small pool (64MiB) it preempts, evicts and refuses."""
WARM_UP = 1 / 3
"""Share of the rounds that fill caches, pools and allocators and are left out of the slope."""
CERTAIN = 3
"""A slope counts that lies so many standard errors above zero."""
IDLE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. leave_after: events of a stream after which the client hangs up; patience: seconds until it does.

    expect: statuses that are right.
    """

    body: dict[str, Any]
    expect: tuple[int, ...] = (200, 429)
    leave_after: int | None = None
    patience: float = 300.0


def text(rng: Random, characters: int) -> str:
    words = rng.choices(WORDS, k=characters // 4 + 1)
    return " ".join(words)[: max(1, characters)]


def random_ask(rng: Random, context: int) -> Ask:
    """context: tokens the server holds; a text has at most as many tokens as characters."""
    short = {"prompt": text(rng, rng.randint(1, 60)), "max_tokens": rng.randint(1, 12), "seed": rng.randrange(99)}
    long = short | {"prompt": text(rng, context // 2), "max_tokens": context // 8}
    shared = short | {"prompt": text(Random(rng.randrange(3)), context // 4) + text(rng, 20)}
    return rng.choice(
        [
            Ask(short),
            Ask(short | {"stream": True, "logprobs": 3}),
            Ask(long),
            Ask(shared),
            Ask(shared | {"n": 3, "stop": ["e", "qu"], "kv_usage": True}),
            Ask(long | {"stream": True}, leave_after=rng.randint(0, 5)),
            Ask(long, patience=rng.uniform(0.01, 0.5)),
            Ask(long | {"timeout": 0.3}),
            Ask(long | {"queue_timeout": 0.1}, expect=(200, 429, 503)),
            Ask(short | {"best_of": 2, "prompt_logprobs": 1, "presence_penalty": 1.0}),
            Ask(short | {"max_tokens": context + 1}, expect=(400,)),
            Ask(short | {"temperature": "hot"}, expect=(400,)),
        ]
    )


class Traffic:
    """Sends asks and counts what came back; whatever was not expected is kept in words."""

    def __init__(self, http: httpx.AsyncClient, context: int, seed: int) -> None:
        self.sent = Counter[str]()
        self.wrong: list[str] = []
        self._http, self._context, self._rng = http, context, Random(seed)

    async def round(self, users: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._user(until) for _ in range(users)))

    async def _user(self, until: float) -> None:
        while time.monotonic() < until:
            ask = random_ask(self._rng, self._context)
            try:
                async with asyncio.timeout(ask.patience):
                    await self._send(ask)
            except TimeoutError:
                self.sent["left"] += 1
            except httpx.HTTPError as error:
                self.wrong.append(f"{type(error).__name__}: {error} for {str(ask.body)[:200]}")

    async def _send(self, ask: Ask) -> None:
        async with self._http.stream("POST", "/v1/completions", json=ask.body) as response:
            self.sent[str(response.status_code)] += 1
            if response.status_code not in ask.expect:
                answer = (await response.aread()).decode()
                self.wrong.append(f"{response.status_code} for {str(ask.body)[:200]}: {answer[:200]}")
                return
            events = 0
            async for _ in response.aiter_lines():
                events += 1
                if ask.leave_after is not None and events > ask.leave_after:
                    return


# ---- the books and the memory of an idle server -----------------------------------------------------------------


async def idle_books(http: httpx.AsyncClient) -> dict[str, Any]:
    """/kv/summary once nothing runs or waits any more."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        books: dict[str, Any] = (await http.get("/kv/summary")).raise_for_status().json()
        if not any(books["requests"].values()) or time.monotonic() > deadline:
            return books
        await asyncio.sleep(0.05)


def faults(books: dict[str, Any]) -> list[str]:
    """What is out of balance in the summary of a server that should be idle."""
    pages, pool = books["pages"], books["bytes"]
    checks = {
        f"requests are left: {books['requests']}": not any(books["requests"].values()),
        f"{pages['active']} pages are active": pages["active"] == 0,
        f"{books['slots']['used']} slots are used": books["slots"]["used"] == 0,
        f"pages do not add up: {pages}": pages["active"] + pages["cached"] + pages["free"] == pages["total"],
        f"bytes do not add up: {pool}": pool["allocated"]
        == pool["active"] + pool["cached"] + pool["free"] + pool["scratch"],
    }
    return [fault for fault, holds in checks.items() if not holds]


def private_bytes(pid: int) -> int:
    """RssAnon + VmSwap: what a process holds for itself, in memory or swapped out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def processes(port: int) -> dict[str, int]:
    """The two processes of the server: name -> pid. The engine is the one with the weights."""
    pids = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server_pids(port)}
    engine = {pid for pid, line in pids.items() if b"spawn_main" in line}
    http = {pid for pid, line in pids.items() if pid not in engine and b"resource_tracker" not in line}
    if len(http) != 1 or len(engine) != 1:
        raise SystemExit(f"soak: no Ropeway server of two processes on this machine listens on port {port}")
    return {"http": http.pop(), "engine": engine.pop()}


@dataclass(frozen=True, slots=True)
class Sample:
    """After one round: seconds since the start, requests so far, bytes of each process without the KV pool."""

    seconds: float
    requests: int
    held: dict[str, int]


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares: bytes a second, with the standard error; growth: bytes over the samples."""

    rate: float
    error: float
    growth: float

    def exceeds(self, tolerance: float) -> bool:
        return self.rate > CERTAIN * self.error and self.growth > tolerance


def slope(seconds: Sequence[float], held: Sequence[float]) -> Slope:
    """At least three samples."""
    mean_x, mean_y = fmean(seconds), fmean(held)
    spread = sum((x - mean_x) ** 2 for x in seconds)
    rate = sum((x - mean_x) * (y - mean_y) for x, y in zip(seconds, held, strict=True)) / spread
    rest = sum((y - mean_y - rate * (x - mean_x)) ** 2 for x, y in zip(seconds, held, strict=True))
    error = (rest / (len(held) - 2) / spread) ** 0.5
    return Slope(rate, error, rate * (seconds[-1] - seconds[0]))


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """What was seen."""

    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)

    def slopes(self) -> dict[str, Slope]:
        kept = self.samples[int(len(self.samples) * WARM_UP) :]
        times = [sample.seconds for sample in kept]
        return {name: slope(times, [sample.held[name] for sample in kept]) for name in kept[0].held}

    def report(self, tolerance: int) -> tuple[str, bool]:
        """The table and the verdict; True if all is well."""
        every = max(1, len(self.samples) // 20)
        lines = [f"{'seconds':>8} {'requests':>9} {'http MiB':>10} {'engine MiB':>11}"]
        for sample in [*self.samples[:-1][::every], self.samples[-1]]:
            held = [sample.held[name] / MIB for name in ("http", "engine")]
            lines.append(f"{sample.seconds:>8.0f} {sample.requests:>9} {held[0]:>10.2f} {held[1]:>11.2f}")
        lines.append("answers: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(self.sent.items())))
        lines += self.wrong[:20]
        well = not self.wrong
        for name, line in self.slopes().items():
            grows = line.exceeds(tolerance)
            well = well and not grows
            lines.append(
                f"{name}: {line.rate * 3600 / MIB:+.2f} +- {line.error * 3600 / MIB:.2f} MiB/hour after warm-up "
                f"({line.growth / MIB:+.2f} MiB in this run): {'GROWS' if grows else 'flat'}"
            )
        return "\n".join(lines), well


async def soak(url: str, minutes: float, users: int, rounds: int, seed: int) -> Soak:
    """Traffic in `rounds` parts against a server on this machine."""
    seen, begun = Soak(), time.monotonic()
    pids = processes(urlsplit(url).port or 80)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        context = (await http.get("/kv/summary")).raise_for_status().json()["max_model_len"]
        traffic = Traffic(http, context, seed)
        for number in range(1, rounds + 1):
            await traffic.round(users, minutes * 60 / rounds)
            books = await idle_books(http)
            seen.wrong += [f"after round {number}: {fault}" for fault in faults(books)]
            held = {name: private_bytes(pid) for name, pid in pids.items()}
            held["engine"] -= books["bytes"]["resident"]
            seen.samples.append(Sample(time.monotonic() - begun, traffic.sent.total(), held))
            print(f"round {number} of {rounds}: {traffic.sent.total()} requests", file=sys.stderr, flush=True)
    seen.wrong += traffic.wrong
    seen.sent = traffic.sent
    return seen


@contextmanager
def started(model: str | None, pool: str) -> Iterator[str]:
    """A server of our own; yields its URL once it is ready."""
    command = [sys.executable, "-m", "server", "serve", *([model] if model else []), *SERVE_FLAGS, pool]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().partition("listening on ")[2].partition(",")[0]
            while url and process.poll() is None and httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.2)
            if process.poll() is not None:
                raise SystemExit(f"soak: the server ended with {process.returncode}")
            yield url
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m server.loadtest.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="what to serve; the demo model if left out")
    parser.add_argument("--url", help="a server that runs on this machine, instead of one started here")
    parser.add_argument("--kv-cache-memory", default="64MiB", help="of the server started here (default 64MiB)")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--rounds", type=int, help="default: one every half minute, at least 20")
    parser.add_argument("--tolerance", type=float, default=2.0, help="MiB of growth that a run may show (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rounds = args.rounds or max(20, int(args.minutes * 2))
    if args.url:
        seen = asyncio.run(soak(args.url, args.minutes, args.users, rounds, args.seed))
    else:
        with started(args.model, args.kv_cache_memory) as url:
            seen = asyncio.run(soak(url, args.minutes, args.users, rounds, args.seed))
    table, well = seen.report(int(args.tolerance * MIB))
    print(table)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
