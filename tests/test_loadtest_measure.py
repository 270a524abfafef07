"""Distributions against numpy, failures as infinite, objectives, and memory that does not grow."""

from __future__ import annotations

import tracemalloc
from array import array
from math import inf, isnan

import numpy as np
import pytest

from server.loadtest.measure import EXACT, Distribution, Figures
from server.loadtest.record import Record
from server.loadtest.slo import MLPERF, parse_duration, parse_slo
from server.loadtest.timeline import MOST, Timeline

LEVELS = {"p1": 0.01, "p50": 0.5, "p90": 0.9, "p99": 0.99, "p100": 1.0}


def filled(values: list[float]) -> Distribution:
    held = Distribution()
    for value in values:
        held.add(value)
    return held


def request(start: float, gap: float, chunks: int, per_chunk: int = 1, error: str = "") -> Record:
    record = Record(0, start, sent=start + 0.001, end=start + 0.1 + gap * chunks, error=error, status=200)
    record.first_byte = start + 0.1
    record.chunk_times = array("d", (start + 0.1 + gap * i for i in range(chunks)))
    record.chunk_tokens = array("I", [per_chunk] * chunks)
    record.completion_tokens, record.prompt_tokens = chunks * per_chunk, 10
    return record


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_quantiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).lognormal(-3, 1, count)
    found = filled(values.tolist()).quantiles(LEVELS)
    for name, level in LEVELS.items():
        assert found[name] == pytest.approx(np.quantile(values, level), rel=1e-12)


def test_past_the_exact_part_quantiles_stay_within_half_a_percent() -> None:
    values = np.random.default_rng(1).lognormal(-3, 1, EXACT + 50_000)
    held = filled(values.tolist())
    for name, value in held.quantiles(LEVELS).items():
        assert value == pytest.approx(np.quantile(values, LEVELS[name]), rel=0.005), name
    assert held.mean() == pytest.approx(values.mean())


def test_failures_are_infinite_beside_successes_only() -> None:
    held = filled([0.1] * 96)
    assert held.quantiles({"p95": 0.95, "p99": 0.99}, infinite=4) == {"p95": 0.1, "p99": inf}
    assert held.quantiles({"p99": 0.99}) == {"p99": 0.1}
    assert isnan(Distribution().quantiles({"p50": 0.5})["p50"])
    assert Distribution().quantiles({"p50": 0.5}, infinite=3) == {"p50": inf}


def test_chunks_of_several_tokens() -> None:
    """Three chunks of four tokens, 0.2 s apart: eight tokens share two gaps; the first chunk has no gap."""
    figures = Figures()
    figures.add(request(0.0, 0.2, 3, per_chunk=4))
    latency = figures.summary()["latency"]
    assert (latency["itl"]["count"], latency["itl"]["p50"]) == (8, pytest.approx(0.05))
    assert (latency["chunk_gap"]["count"], latency["chunk_gap"]["p50"]) == (2, pytest.approx(0.2))
    assert latency["tpot"]["p50"] == pytest.approx(0.4 / 11)
    assert latency["ttft"]["p50"] == pytest.approx(0.099)
    assert latency["ttft_intended"]["p50"] == pytest.approx(0.1)
    assert latency["ntpot"]["p50"] == pytest.approx(0.499 / 12)


def test_goodput_counts_failures_as_missed() -> None:
    figures = Figures(parse_slo("ttft=150ms,tpot=30ms"))
    for record in (
        request(0, 0.02, 10),
        request(1, 0.05, 10),
        request(2, 0.02, 10, error="reset"),
        request(3, 0.02, 1),
    ):
        figures.add(record)
    assert figures.summary()["rates"]["attainment"] == 2 / 4


def test_objectives_are_read() -> None:
    assert parse_slo("ttft=200ms, tpot=50ms,e2e=5s").limits == {"ttft": 0.2, "tpot": 0.05, "e2e": 5.0}
    assert parse_slo("mlperf:llama3.1-8b").limits == {"ttft": 2.0, "tpot": 0.1}
    assert all(parse_slo(f"mlperf:{name}").limits["tpot"] > 0 for name in MLPERF)
    assert [parse_duration(text) for text in ("200ms", "1.5", "2m", "1h", "50us")] == pytest.approx(
        [0.2, 1.5, 120.0, 3600.0, 5e-5]
    )


@pytest.mark.parametrize("text", ["", "ttft", "ttft=fast", "p99=1s", "mlperf:gpt-1", "ttft=-1s", "ttft=nans"])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|no MLPerf|must be"):
        parse_slo(text)


def test_memory_does_not_grow_with_the_length_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once every distribution has left its exact part (made small here), more requests take no more memory."""
    monkeypatch.setattr("server.loadtest.measure.EXACT", 100)
    figures, timeline = Figures(), Timeline(0.0)

    def feed(begin: int, count: int) -> None:
        for index in range(begin, begin + count):
            record = request(index * 1.0, 0.02, 10, per_chunk=3)
            figures.add(record)
            timeline.add(record)

    feed(0, 700)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    feed(700, 700)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
    assert len(timeline.buckets) <= MOST


def test_the_end_of_a_timeline_is_no_collapse() -> None:
    """A hundred tokens a second to the end, wherever in a bucket the run ends."""
    for tokens in (30, 51, 60, 74, 76, 110, 790):
        timeline = Timeline(0.0)
        timeline.add(request(-0.1, 0.01, tokens))
        assert timeline.rows()[-1]["tokens_per_second"] == pytest.approx(100, rel=0.05), tokens


def test_a_timeline_keeps_every_token() -> None:
    timeline = Timeline(0.0)
    for index in range(2000):
        timeline.add(request(index * 1.0, 0.1, 5))
    rows = timeline.rows()
    assert len(rows) <= MOST
    edges = [row["at"] or 0.0 for row in rows] + [timeline.end]
    rates = [row["tokens_per_second"] or 0.0 for row in rows]
    assert np.dot(rates, np.diff(edges)) == pytest.approx(10_000)
    assert sum(row["ok"] or 0 for row in rows) == 2000
