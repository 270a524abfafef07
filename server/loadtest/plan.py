"""From options to loads and work: which runs there are, and what each sends.

Knows the options' names; knows nothing about servers.
"""

from __future__ import annotations

from argparse import Namespace
from array import array
from collections.abc import Iterator
from pathlib import Path
from random import Random

from server.loadtest.arrivals import Arrivals
from server.loadtest.run import Load, Work
from server.loadtest.workload import (
    Conversation,
    Filler,
    Shape,
    from_texts,
    read_texts,
    read_trace,
    repeated,
    synthetic,
    trace_line,
)


def work_of(options: Namespace) -> Work:
    """A maker of conversations for (filler, seed with nonce)."""
    if options.trace:
        return lambda filler, seed: read_trace(options.trace, filler, seed, options.speedup)
    shape = Shape(options.input_len, options.output_len, options.shared_prefix, options.turns, options.think)
    texts = None
    if options.prompts not in ("words", "ids"):
        texts = read_texts(Path(options.prompts), options.input_len(Random(options.seed)))

    def make(filler: Filler, seed: str) -> Iterator[Conversation]:
        if texts is None:
            return synthetic(shape, filler, seed)
        return from_texts(texts, options.output_len, seed, mark=options.cache == "cold")

    if options.cache == "warm":
        return lambda filler, seed: repeated(lambda: make(filler, seed), options.distinct)
    return make


def loads_of(options: Namespace, filler: Filler) -> list[Load]:
    """One load for each point asked for."""
    if options.trace:
        return [trace_load(options, filler)]
    closed = [closed_load(options, users) for users in options.concurrency]
    return closed + [open_load(options, rates) for rates in options.rate or []]


def closed_load(options: Namespace, users: int) -> Load:
    requests = options.num_requests or (None if options.duration else max(20, 4 * users))
    return Load(f"concurrency {users}", users=users, requests=requests, seconds=options.duration)


def open_load(options: Namespace, rates: tuple[float, float]) -> Load:
    """A rate or a ramp, for --duration or as long as --num-requests take (default 30 s)."""
    arrivals = Arrivals(*rates, shape=options.arrivals)
    seconds = options.duration or (arrivals.seconds_for(options.num_requests) if options.num_requests else 30.0)
    offsets = arrivals.offsets(seconds, Random(f"{options.seed}:arrivals"), options.num_requests)
    label = f"rate {rates[0]:.3g}/s" if rates[0] == rates[1] else f"ramp {rates[0]:.3g} to {rates[1]:.3g}/s"
    return Load(label, offsets=offsets, rate=sum(rates) / 2, seconds=seconds)


def trace_load(options: Namespace, filler: Filler) -> Load:
    offsets = array("d", (made.at for made in read_trace(options.trace, Filler("ids"), "0", options.speedup)))
    if not offsets:
        raise ValueError(f"{options.trace}: no request in it")
    span = offsets[-1] - offsets[0]
    shifted = array("d", (at - offsets[0] for at in offsets))
    return Load(
        f"trace {options.trace.name}", offsets=shifted, rate=len(offsets) / span if span else None, seconds=span
    )


def save_trace(options: Namespace, filler: Filler) -> None:
    """The first rate's schedule and its prompts, in the form that --trace replays byte for byte."""
    load = open_load(options, options.rate[0])
    assert load.offsets is not None
    made = work_of(options)(filler, f"{options.seed}:{options.nonce}")
    lines = (trace_line(conversation, at) for conversation, at in zip(made, load.offsets, strict=False))
    options.save_trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
