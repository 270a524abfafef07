"""Service-level objectives: which requests count as good.

Knows the limits, nothing about distributions. Latencies count from the intended start, so a late client helps nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.loadtest.record import Record

METRICS = ("ttft", "tpot", "e2e")
# MLPerf Inference, Server and Interactive scenarios: limits on TTFT and TPOT in milliseconds (loadgen/mlperf.conf).
MLPERF = {
    "llama2-70b": (2000, 200),
    "llama2-70b-interactive": (450, 40),
    "llama3.1-8b": (2000, 100),
    "llama3.1-8b-interactive": (500, 30),
    "llama3.1-405b": (6000, 175),
    "llama3.1-405b-interactive": (4500, 80),
    "deepseek-r1": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 15),
}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """`200ms`, `1.5s`, `2m`, or plain seconds."""
    number = text.rstrip("smhu")
    try:
        seconds = float(number) * UNITS[text[len(number) :] or "s"]
    except (ValueError, KeyError):
        raise ValueError(f"duration {text!r}: expected a number with us, ms, s, m or h") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"duration {text!r}: must be zero or more, and finite")
    return seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds by metric, and the words they were given in."""

    limits: dict[str, float]
    text: str

    def met(self, record: Record) -> bool:
        """True for a successful request within every limit. TPOT of a single token counts as 0."""
        return record.ok and all(self._value(name, record) <= limit for name, limit in self.limits.items())

    @staticmethod
    def _value(name: str, record: Record) -> float:
        match name:
            case "ttft":
                return record.first - record.intended
            case "tpot":
                return (record.last - record.first) / (record.tokens - 1) if record.tokens > 1 else 0.0
        return record.last - record.intended


def parse_slo(text: str) -> Slo:
    """`ttft=200ms,tpot=50ms,e2e=5s` or `mlperf:NAME`."""
    if text.startswith("mlperf:"):
        return _mlperf(text)
    limits = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in METRICS:
            raise ValueError(
                f"SLO {part!r}: expected METRIC=DURATION with METRIC one of {', '.join(METRICS)}, or mlperf:NAME"
            )
        limits[name.strip()] = parse_duration(value.strip())
    return Slo(limits, text)


def _mlperf(text: str) -> Slo:
    name = text.removeprefix("mlperf:")
    if name not in MLPERF:
        raise ValueError(f"no MLPerf profile {name!r}; there are {', '.join(MLPERF)}")
    ttft, tpot = MLPERF[name]
    return Slo({"ttft": ttft / 1000, "tpot": tpot / 1000}, f"{text} (ttft={ttft}ms,tpot={tpot}ms)")
