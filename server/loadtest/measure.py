"""The figures of a run, each with its formula beside its name.

Knows nothing about how requests were sent. Memory does not grow with the length of a run: a distribution keeps
100,000 values exactly, then moves to logarithmic buckets 0.5 % wide.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, inf, log, nan
from typing import Any

from server.loadtest.record import Record
from server.loadtest.slo import Slo

EXACT = 100_000
GROWTH = 1.005
SMALLEST = 1e-6
BUCKETS = ceil(log(1e11) / log(GROWTH))  # up to 1e5 seconds
CURVE = (0.0, 0.1, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Distribution:
    """Values in seconds. Quantiles interpolate between order statistics, as numpy does by default."""

    def __init__(self) -> None:
        self.count, self.total, self.least, self.most = 0, 0.0, inf, -inf
        self._exact: array[float] | None = array("d")
        self._buckets = array("Q")

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)
        if self._exact is None:
            self._buckets[bucket(value)] += times
            return
        if times == 1:
            self._exact.append(value)
        else:
            self._exact.extend([value] * times)
        if len(self._exact) > EXACT:
            self._fold()

    def _fold(self) -> None:
        assert self._exact is not None
        self._buckets = array("Q", bytes(8 * (BUCKETS + 1)))
        for value in self._exact:
            self._buckets[bucket(value)] += 1
        self._exact = None

    def mean(self) -> float:
        return self.total / self.count if self.count else nan

    def quantiles(self, levels: dict[str, float], infinite: int = 0) -> dict[str, float]:
        """Quantiles of the values together with `infinite` more that never ended."""
        ordered = None if self._exact is None else sorted(self._exact)
        total = self.count + infinite
        return {name: self._at(level * (total - 1), ordered) if total else nan for name, level in levels.items()}

    def _at(self, rank: float, ordered: list[float] | None) -> float:
        below = int(rank)
        share = rank - below
        low = self._ordinal(below, ordered)
        if share == 0 or low == inf:
            return low
        high = self._ordinal(below + 1, ordered)
        return inf if high == inf else low + share * (high - low)

    def _ordinal(self, index: int, ordered: list[float] | None) -> float:
        if index >= self.count:
            return inf
        if ordered is not None:
            return ordered[index]
        seen = 0
        for number, held in enumerate(self._buckets):
            seen += held
            if seen > index:
                middle: float = SMALLEST * GROWTH ** (number + 0.5)
                return min(self.most, max(self.least, middle))
        raise AssertionError("the buckets hold fewer values than were counted")


def bucket(value: float) -> int:
    return 0 if value <= SMALLEST else min(BUCKETS, int(log(value / SMALLEST) / log(GROWTH)))


@dataclass(frozen=True, slots=True)
class Quantity:
    """One latency of a request: seconds, or None where it is not defined."""

    name: str
    title: str
    formula: str
    of: Callable[[Record], float | None]


def tpot(record: Record) -> float | None:
    return (record.last - record.first) / (record.tokens - 1) if record.tokens > 1 else None


QUANTITIES = (
    Quantity("ttft", "TTFT", "first token - sent", lambda r: r.first - r.sent),
    Quantity("ttft_intended", "TTFT from intended", "first token - intended", lambda r: r.first - r.intended),
    Quantity("e2e", "E2E", "last token - sent", lambda r: r.last - r.sent),
    Quantity("e2e_intended", "E2E from intended", "last token - intended", lambda r: r.last - r.intended),
    Quantity("tpot", "TPOT", "(last token - first token) / (n - 1), per request with n > 1", tpot),
    Quantity("ntpot", "NTPOT", "(last token - sent) / n, per request", lambda r: (r.last - r.sent) / max(1, r.tokens)),
    Quantity("first_byte", "first byte", "first byte of the reply - sent", lambda r: r.first_byte - r.sent),
)
ITL = Quantity(
    "itl",
    "ITL",
    "by token, pooled: chunk gap / tokens in the chunk, once per token; first chunk left out",
    lambda r: None,
)
CHUNK_GAP = Quantity("chunk_gap", "chunk gap", "pooled: between chunks that carry tokens", lambda r: None)
LATENCIES = (*QUANTITIES, ITL, CHUNK_GAP)
RATES = {
    "request_rate": "successful requests / (last end - first sent)",
    "output_rate": "output tokens of successful requests / (last end - first sent)",
    "input_rate": "input tokens of successful requests / (last end - first sent)",
    "goodput": "requests that met every SLO, from intended / (last end - first sent)",
    "attainment": "requests that met every SLO, from intended / requests sent (failures miss)",
    "mean_in_flight": "sum of (end - sent) / (last end - first sent)",
}


def gaps(record: Record) -> Iterator[tuple[float, int]]:
    """(chunk gap in seconds, tokens that came with it) for every chunk after the first."""
    times, tokens = record.chunk_times, record.chunk_tokens
    for index in range(1, len(times)):
        yield times[index] - times[index - 1], tokens[index]


class Figures:
    """Takes finished records one by one; `summary()` may be asked at any time."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo
        self.sent = self.good = self.missing_done = 0
        self.errors: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.sources: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.cached_reported = 0
        self.latencies = {quantity.name: Distribution() for quantity in LATENCIES}
        self.send_lag = Distribution()
        self._begin, self._finish, self._busy = inf, -inf, 0.0

    def add(self, record: Record) -> None:
        self.sent += 1
        self.send_lag.add(max(0.0, record.sent - record.intended))
        self._begin, self._finish = min(self._begin, record.sent), max(self._finish, record.end)
        self._busy += record.end - record.sent
        if record.ok:
            self._success(record)
        else:
            self.errors[record.error] += 1
            self.details.setdefault(record.error, record.detail)

    def _success(self, record: Record) -> None:
        self.missing_done += record.missing_done
        self.sources[record.token_source] += 1
        self.tokens["output"] += record.tokens
        self.tokens["input"] += record.prompt_tokens or 0
        if record.cached_tokens is not None:
            self.cached_reported += 1
            self.tokens["cached"] += record.cached_tokens
        self.good += self._slo is not None and self._slo.met(record)
        for quantity in QUANTITIES:
            if (value := quantity.of(record)) is not None:
                self.latencies[quantity.name].add(value)
        for gap, tokens in gaps(record):
            self.latencies["chunk_gap"].add(gap)
            if tokens:
                self.latencies["itl"].add(gap / tokens, tokens)

    @property
    def ok(self) -> int:
        return self.sent - self.errors.total()

    @property
    def seconds(self) -> float:
        """From the first request sent to the end of the last."""
        return max(self._finish - self._begin, 0.0) if self.sent else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers; seconds, tokens and requests."""
        return {
            "duration": self.seconds,
            "requests": {
                "sent": self.sent,
                "ok": self.ok,
                "failed": dict(self.errors),
                "first_of_each": self.details,
                "missing_done": self.missing_done,
            },
            "tokens": {
                "input": self.tokens["input"],
                "output": self.tokens["output"],
                "cached": self._cached(),
                "counted_by": dict(self.sources),
            },
            "rates": self._rates(),
            "latency": {name: self._latency(held) for name, held in self.latencies.items()},
            "send_lag": spread_of(self.send_lag),
        }

    def _cached(self) -> int | None:
        return self.tokens["cached"] if self.cached_reported else None

    def _rates(self) -> dict[str, float]:
        seconds = self.seconds or nan
        rates = {
            "request_rate": self.ok / seconds,
            "output_rate": self.tokens["output"] / seconds,
            "input_rate": self.tokens["input"] / seconds,
            "mean_in_flight": self._busy / seconds,
        }
        if self._slo:
            rates |= {"goodput": self.good / seconds, "attainment": self.good / self.sent if self.sent else nan}
        return rates

    def _latency(self, held: Distribution) -> dict[str, Any]:
        pooled = held in (self.latencies["itl"], self.latencies["chunk_gap"])
        found = spread_of(held)
        if not pooled:  # a token that never came belongs to no request: only per-request figures can count failures
            found["failures_as_infinite"] = held.quantiles(QUANTILES, infinite=self.errors.total())
        return found


def spread_of(held: Distribution) -> dict[str, Any]:
    most = held.most if held.count else nan
    curve = held.quantiles({str(level): level for level in CURVE if level <= 1 - 1 / max(1, held.count)})
    return {
        "count": held.count,
        "mean": held.mean(),
        **held.quantiles(QUANTILES),
        "max": most,
        "curve": [[float(level), value] for level, value in curve.items()],
    }
