"""A step on its way: what was launched for which rows, and its results once the host may read them.

Knows no model; everything here is a download, except the sampled tokens that the next step begins with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from model.batch import Sampled
from server.engine.plan import PlanRow, RowResult
from server.engine.request import Sequence
from server.engine.sampler import ScoredPrompt, prompt_logprobs, sampled_tokens
from server.engine.stream import Mark


@dataclass(slots=True)
class Part:
    """Rows that went through the decoder together, or the one that could not."""

    rows: list[PlanRow]
    samples: list[tuple[Sequence, int]] = field(default_factory=list)
    sampled: Sampled | None = None  # on the device
    on_host: Sampled | None = None
    scored: dict[int, ScoredPrompt] = field(default_factory=dict)  # by index in rows
    states: dict[int, Tensor] = field(default_factory=dict)  # [N, D] of prompts that end without a sample
    error: str | None = None

    def results(self) -> list[RowResult]:
        if self.error is not None:
            return [RowResult(error=self.error) for _ in self.rows]
        tokens = iter(sampled_tokens(self.samples, self.on_host) if self.on_host is not None else ())
        results = [RowResult(tokens=[next(tokens) for _ in row.samples]) for row in self.rows]
        for index, scored in self.scored.items():
            results[index].prompt_logprobs = prompt_logprobs(scored)
        for index, states in self.states.items():
            _end_unsampled(results[index], self.rows[index], states)
        return results


def _end_unsampled(result: RowResult, row: PlanRow, states: Tensor) -> None:
    """An embedding is the state of the last token [D], or the mean of all, scaled to length one."""
    request, state = row.sequence.request, states[-1]
    if request.mean_state is not None:
        request.mean_state.add(row.start, states.double().numpy())
        state = torch.from_numpy(request.mean_state.value())
    if row.end < request.prompt_len:
        return
    result.finite = bool(state.isfinite().all())
    if result.finite and request.kind == "embed":
        result.embedding = tuple(normalize(state.float(), dim=0).tolist())


@dataclass(slots=True)
class LaunchedStep:
    parts: list[Part]
    end: Mark

    def collect(self) -> list[RowResult]:
        self.end.synchronize()
        return [result for part in self.parts for result in part.results()]
