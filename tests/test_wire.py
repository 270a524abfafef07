"""The pipe and the histograms, which a token passes in fast forms: each against its plain one."""

from __future__ import annotations

import pickle

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st

from server.engine.facts import EngineStats
from server.engine.messages import (
    Admitted,
    Answer,
    FromEngine,
    Progress,
    RequestUsage,
    Row,
    StepOutput,
    TokenLogprob,
)
from server.engine.wire import from_bytes, to_bytes
from server.engine_process import LENGTH, Frames
from server.histogram import Histogram

STEP = StepOutput(
    (
        Row("a-0", 0, (7,), (TokenLogprob(7, -0.5, ((7, -0.5),)),)),
        Row("a-0", 1, (8, 9), finish="stop", stop_token=9, usage=RequestUsage(peak_pages=3)),
    ),
    EngineStats(running=2, step_seconds=0.25),
    ((0, 5, "new", "a-0", "tenant"),),
)
MESSAGES: list[FromEngine] = [
    Progress("load"),
    Admitted(("a-0",)),
    STEP,
    StepOutput((), EngineStats()),
    Answer(3, {"pages": [1, 2]}),
]


def test_messages_cross_unchanged() -> None:
    for message in MESSAGES:
        crossed = from_bytes(to_bytes(message))
        assert crossed == message and type(crossed) is type(message)
    crossed = from_bytes(to_bytes(STEP))
    assert type(crossed.rows[1]) is Row and type(crossed.stats) is EngineStats


@given(st.lists(st.integers(1, 400), min_size=1))
def test_messages_arrive_however_the_pipe_cuts_them(sizes: list[int]) -> None:
    """As Connection.send and as to_bytes write them."""
    contents = [pickle.dumps(MESSAGES[0]), *map(to_bytes, MESSAGES[1:])]
    data = b"".join(LENGTH.pack(len(content)) + content for content in contents)
    frames, arrived, at, turn = Frames(), list[FromEngine](), 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        arrived += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert arrived == MESSAGES


VALUES = st.one_of(st.sampled_from([0.0, 0.1, 1.0, 2.5, 100.0]), st.floats(0, 200))


@given(st.lists(VALUES))
def test_a_histogram_is_what_prometheus_makes_of_the_same_values(values: list[float]) -> None:
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # as the server does
    registry, theirs_registry = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    ours = Histogram("x:y_seconds", "help", {"model": "m", "engine": "0"}, (0.1, 1, 2.5))
    registry.register(ours)
    family = prometheus_client.Histogram(
        "x:y_seconds", "help", ["model", "engine"], buckets=(0.1, 1, 2.5), registry=theirs_registry
    )
    theirs = family.labels("m", "0")
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert prometheus_client.generate_latest(registry) == prometheus_client.generate_latest(theirs_registry)
