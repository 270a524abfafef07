"""Tokens, requests and latencies along the time of a run, in a bounded number of buckets.

Knows nothing about drawing. At most 600 buckets: when a run outgrows them, pairs merge and the step doubles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from server.loadtest.record import Record

MOST = 600


@dataclass(slots=True)
class Bucket:
    tokens: int = 0
    ok: int = 0
    failed: int = 0
    ttft_total: float = 0.0

    def merge(self, other: Bucket) -> Bucket:
        return Bucket(
            self.tokens + other.tokens,
            self.ok + other.ok,
            self.failed + other.failed,
            self.ttft_total + other.ttft_total,
        )


@dataclass(slots=True)
class Timeline:
    """`origin` is the clock's value at the beginning of the run; seconds."""

    origin: float
    step: float = 0.5
    end: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)

    def add(self, record: Record) -> None:
        for moment, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            self._at(moment).tokens += tokens
        self.end = max(self.end, record.end - self.origin)
        bucket = self._at(record.end)
        if record.ok:
            bucket.ok += 1
            bucket.ttft_total += record.first - record.intended
        else:
            bucket.failed += 1

    def _at(self, moment: float) -> Bucket:
        while (index := int(max(0.0, moment - self.origin) / self.step)) >= MOST:
            self.buckets = [self._pair(start) for start in range(0, len(self.buckets), 2)]
            self.step *= 2
        while len(self.buckets) <= index:
            self.buckets.append(Bucket())
        return self.buckets[index]

    def _pair(self, start: int) -> Bucket:
        return self.buckets[start].merge(self.buckets[start + 1] if start + 1 < len(self.buckets) else Bucket())

    def rows(self) -> list[dict[str, float | None]]:
        """Per bucket: its start, output tokens per second, requests ended, mean TTFT of those that ended well."""
        return [
            {
                "at": at,
                "tokens_per_second": held.tokens / width,
                "ok": held.ok,
                "failed": held.failed,
                "ttft_mean": held.ttft_total / held.ok if held.ok else None,
            }
            for at, width, held in self._spans()
        ]

    def _spans(self) -> Iterator[tuple[float, float, Bucket]]:
        """Start, width and contents. The last one is as wide as the run filled it, with the one before if hardly."""
        held = list(self.buckets)
        if len(held) > 1 and self.end - (len(held) - 1) * self.step < self.step / 2:
            held[-2:] = [held[-2].merge(held[-1])]
        for number, bucket in enumerate(held):
            at = number * self.step
            yield at, self.step if number < len(held) - 1 else self.end - at, bucket
