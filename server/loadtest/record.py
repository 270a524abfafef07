"""What is kept of one request: its times, its tokens and how it ended.

Knows nothing about HTTP, about a workload, or about what the figures computed from it are called.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import isnan, nan

OK = ""


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of one monotonic clock; NaN where the moment never came.

    `chunk_times[i]` is the arrival of the i-th chunk that carried tokens and `chunk_tokens[i]` how many it carried;
    8 + 4 bytes a chunk is all that a stream costs while it runs.
    """

    index: int
    intended: float
    sent: float = nan
    connected: float = nan
    first_byte: float = nan
    end: float = nan
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("I"))
    status: int = 0
    error: str = OK
    detail: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: str = "none"
    finish_reason: str = ""
    missing_done: bool = False
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error == OK

    @property
    def first(self) -> float:
        """Arrival of the first token; NaN before it."""
        return self.chunk_times[0] if self.chunk_times else nan

    @property
    def last(self) -> float:
        """Arrival of the last token; NaN before it."""
        return self.chunk_times[-1] if self.chunk_times else nan

    @property
    def tokens(self) -> int:
        """Output tokens: the server's `usage`, else what its chunks carried."""
        return sum(self.chunk_tokens) if self.completion_tokens is None else self.completion_tokens

    def fail(self, kind: str, detail: str = "") -> None:
        """The first cause stands: what follows from it is not a second fault."""
        if self.ok:
            self.error, self.detail = kind, detail[:300]

    def offset(self, moment: float) -> float | None:
        """Seconds from the intended start, for a report; None where the moment never came."""
        return None if isnan(moment) else moment - self.intended
