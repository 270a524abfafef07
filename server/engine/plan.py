"""What one step shall compute: the scheduler's decision as plain data, and the runner's protocol.

Knows no tensors, no clock and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from server.engine.messages import TokenLogprob
from server.engine.request import Sequence


@dataclass(slots=True)
class PlanRow:
    """Compute tokens start .. end - 1 of a sequence; if they are its last, sample for it and for its fresh forks.

    A token beyond the known ones (end > len(sequence.tokens)) is the one sampled by the step launched before.
    scores_prompt: logits of every row of the chunk are wanted, for the log-probabilities of the prompt.
    """

    sequence: Sequence
    start: int
    end: int
    samples: list[Sequence] = field(default_factory=list)
    scores_prompt: bool = False


Copies = list[list[tuple[int, int]]]
"""Per group: (from, to) pages."""


@dataclass(slots=True)
class StepPlan:
    """Rows in order of importance. copies: pages to copy before anything is written, each for one of the rows."""

    copies: Copies
    rows: list[PlanRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class SampledToken:
    """finite is False where the logits held NaN or infinity: the token means nothing."""

    token: int
    finite: bool = True
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class RowResult:
    """What a plan row brought: tokens for row.samples in order, or an error that ends the request.

    finite is False where a prompt that samples nothing ended in NaN or infinity.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens start + 1 .. of the prompt
    embedding: tuple[float, ...] | None = None
    error: str | None = None
    finite: bool = True


class Pending(Protocol):
    """A launched step."""

    def collect(self) -> list[RowResult]:
        """Wait for the step; one result for each row of the plan, in order."""
        ...


class Runner(Protocol):
    """A device that executes plans in the order in which they are launched.

    overlaps: collect arrives late, so the next step is planned and launched before this one is collected.
    """

    overlaps: bool

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a step; its results come from collect() on what is returned."""
