"""The engine's promises about time, measured: python -m server.measure.engine gaps|prefix|caching|overhead.

Drives an engine in this process, in token ids: no HTTP, no text. A and B take turns and medians are compared; a run
during which other processes used over 5 % of the CPU is called disturbed: take it again on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch
from model.kv_cache import KVCache
from server.engine.core import Engine
from server.engine.cores import usable_cores
from server.engine.facts import EngineConfig
from server.engine.messages import Abort, SamplingParams, Submit
from server.engine.startup import build_engine
from server.loadtest.machine import CpuWatch

DISTURBED = 0.05
STREAMS = 8
LONG_PROMPT = 8000
PREFIX = 1000
CROWD_PROMPT, CROWD_OUTPUT = 128, 24
CROWD_TOKENS = STREAMS * (CROWD_PROMPT + CROWD_OUTPUT)


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure and the most it may be."""

    what: str
    figure: float
    limit: float
    detail: str

    @property
    def is_met(self) -> bool:
        return self.figure <= self.limit

    def line(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.what}: {self.figure:.3f} (at most {self.limit:g}: {verdict}); {self.detail}"


serials = count()


def prompt_of(engine: Engine, length: int) -> list[int]:
    """Token ids that no earlier prompt began with."""
    serial = next(serials)
    return [(serial * 7919 + position * 104729) % engine.info.vocab_size for position in range(length)]


def submit(engine: Engine, prompt: list[int], max_tokens: int) -> str:
    name = f"r{next(serials)}"
    engine.add(Submit(name, Submit.pack(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
    return name


def run(engine: Engine) -> float:
    """Seconds until nothing is left to do."""
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def timed_step(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def timed_steps(engine: Engine, until: Callable[[set[str]], bool]) -> Iterator[float]:
    """Seconds of each step up to the one whose ids of rows satisfy `until`: the gap between two tokens of a stream."""
    ids: set[str] = set()
    while not until(ids):
        started = time.perf_counter()
        ids = {row.id for row in engine.step().rows}
        yield time.perf_counter() - started


def start_streams(engine: Engine, tokens: int = 4000) -> None:
    for _ in range(STREAMS):
        submit(engine, prompt_of(engine, 64), tokens)
    while engine.scheduler.waiting or engine.step().stats.step_tokens != STREAMS:
        engine.step()


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


# ---- the four measurements -------------------------------------------------------------------------------------


def gaps(config: EngineConfig) -> list[Finding]:
    """Gaps between tokens of running streams while a long prompt arrives, and before it."""
    engine = build_engine(config)
    length = min(LONG_PROMPT, engine.info.max_model_len - 1)
    start_streams(engine)
    steps = count()
    alone = list(timed_steps(engine, lambda ids: next(steps) >= 50))
    name = submit(engine, prompt_of(engine, length), 1)
    during = list(timed_steps(engine, lambda ids: name in ids))
    engine.abort(Abort(engine.request_ids()))
    run(engine)
    detail = (
        f"p50 {median(during) * 1e3:.1f} ms, p99 {p99(during) * 1e3:.1f} ms of {len(during)} gaps with up to "
        f"{engine.info.mixed_chunk} prompt tokens each; before it p50 {median(alone) * 1e3:.1f} ms, p99 over that "
        f"{p99(during) / median(alone):.1f}"
    )
    what = f"p99 over p50 of the gaps of {STREAMS} streams while {length} tokens of prompt arrive"
    return [Finding(what, p99(during) / median(during), 3, detail)]


def prefix(config: EngineConfig, rounds: int = 7) -> list[Finding]:
    """Time to first token of a prompt that is in the cache, over one that is not."""
    engine = build_engine(config)
    misses, hits = list[float](), list[float]()
    for _ in range(rounds):
        prompt = prompt_of(engine, min(PREFIX, engine.info.max_model_len - 1))
        for seconds in (misses, hits):
            submit(engine, prompt, 1)
            seconds.append(run(engine))
    times = f"hit {median(hits) * 1e3:.1f} ms, miss {median(misses) * 1e3:.1f} ms, {rounds} pairs"
    ratio = median(hit / miss for hit, miss in zip(hits, misses, strict=True))
    return [Finding(f"time to first token of a {len(prompt)}-token prefix hit over a miss", ratio, 0.15, times)]


def caching(config: EngineConfig, rounds: int = 24) -> list[Finding]:
    """Throughput lost with the prefix cache on when nothing is ever found in it.

    One engine does the same work in turns with and without: two would differ by where their weights lie in memory. Its
    pool was filled before, since memory that is touched for the first time costs once, whoever comes.
    """
    engine = build_engine(config)
    pool = engine.tables.pools[0]
    while pool.touched < pool.num_pages:
        crowd(engine)
    crowds: dict[bool, list[list[float]]] = {True: [], False: []}
    for number in range(rounds):
        for on in (True, False) if number % 2 else (False, True):
            engine.tables.prefix_caching = on
            crowds[on].append(crowd(engine))
    assert engine.step().stats.prefix_hits == 0, "a prompt was found in the cache"
    with_cache, without = undisturbed(crowds[True]), undisturbed(crowds[False])
    detail = f"{CROWD_TOKENS / with_cache:.0f} tokens/s on, {CROWD_TOKENS / without:.0f} off, {rounds} pairs"
    return [Finding("throughput lost with prefix caching at 0 % hits", 1 - without / with_cache, 0.02, detail)]


def crowd(engine: Engine) -> list[float]:
    """Seconds of each step for 8 prompts of 128 tokens that get 24 tokens each."""
    for _ in range(STREAMS):
        submit(engine, prompt_of(engine, CROWD_PROMPT), CROWD_OUTPUT)
    seconds = list[float]()
    while engine.has_work:
        seconds.append(timed_step(engine))
    return seconds


def undisturbed(crowds: list[list[float]]) -> float:
    """Seconds of a crowd: for each of its steps the median over crowds, since steps that somebody disturbed are few."""
    return sum(median(crowd[step] for crowd in crowds) for step in range(len(crowds[0])))


class TimedModel:
    """Stands before the decoder and adds up the seconds of its forwards."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        self._model = model

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        return self._timed(self._model.hidden, batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._timed(self._model.logits, hidden)

    def _timed(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        started = time.perf_counter()
        result = function(*args)
        self.seconds += time.perf_counter() - started
        return result


def overhead(config: EngineConfig, steps: int = 200) -> list[Finding]:
    """Share of a decode step that is not the model's forward: schedule, batch, sampling, books."""
    engine = build_engine(config)
    runner: Any = engine._runner
    runner._model = timed = TimedModel(runner._model)
    start_streams(engine)
    shares, whole = list[float](), list[float]()
    for _ in range(steps):
        before = timed.seconds
        started = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - started)
        shares.append(1 - (timed.seconds - before) / whole[-1])
    detail = f"step {median(whole) * 1e3:.2f} ms, {steps} steps of {STREAMS} sequences, {engine.info.backend}"
    return [Finding("share of a step that is not the forward", median(shares), 0.10, detail)]


MEASURES: dict[str, Callable[[EngineConfig], list[Finding]]] = {
    "gaps": gaps,
    "prefix": prefix,
    "caching": caching,
    "overhead": overhead,
}


def demo_model() -> Path:
    from convert.cache import ensure_canonical
    from convert.demo import demo_model_file

    return ensure_canonical(demo_model_file())


def model_folder(text: str) -> Path:
    """A --model of the command line."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"no config.json in {text}: give a folder that `ropeway convert` made")
    return Path(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m server.measure.engine", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("measures", nargs="+", choices=(*MEASURES, "all"), metavar="|".join((*MEASURES, "all")))
    parser.add_argument("--model", type=model_folder, help="a canonical folder; the demo model if left out")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = EngineConfig(
        str(args.model or demo_model()), kv_cache_memory=320 << 20, kv_cache_dtype=args.kv_cache_dtype,
        threads=args.threads,
    )  # fmt: skip
    names = list(MEASURES) if "all" in args.measures else args.measures
    met = True
    for name in names:
        watch = CpuWatch([])
        for finding in MEASURES[name](config):
            print(finding.line(), flush=True)
            met = met and finding.is_met
        others = watch.summary()["others"]
        if others is not None and others > DISTURBED:
            print(f"disturbed: other processes used {others:.0%} of the CPU", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
