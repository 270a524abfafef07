"""One plan as plain numbers: what the report prints, the plot draws and --json writes.

Knows no text layout. Bytes are of one device unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.kv_cost import SCRATCH_PAGES
from server.plan.advice import Change, advise
from server.plan.compare import Variant, others, variants_of
from server.plan.lengths import Lengths
from server.plan.preemption import Overflow
from server.plan.source import PlannedModel
from server.plan.waterfall import Outcome, Scenario, evaluate, request_bytes

ACCEPTED_CHANCE = 0.01


@dataclass(frozen=True, slots=True)
class AtContext:
    """One request of `context` tokens: its pages, their exact bytes, the bytes of its tokens alone, how many fit."""

    context: int
    pages: tuple[int, ...]
    page_bytes: int
    token_bytes: int
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """chance: that `concurrency` requests at full length need more than the pool; most: requests within `accepted`.

    cut: share of the lengths that are longer than the context and count as the context.
    """

    lengths: Lengths
    cut: float
    mean_tokens: float
    tail_waste: float
    chance: float
    accepted: float
    most: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about one model under one load."""

    model: PlannedModel
    scenario: Scenario
    outcome: Outcome
    contexts: tuple[AtContext, ...]
    preemption: Preemption | None
    advice: tuple[Change, ...]
    variants: tuple[Variant, ...]

    def to_json(self) -> dict[str, Any]:
        scenario, outcome = self.scenario, self.outcome
        layout = outcome.layout
        groups = [
            asdict(group) | {"token_bytes": group.token_bytes, "page_bytes": layout.page_bytes(index)}
            for index, group in enumerate(layout.groups)
        ]
        whole = {name: getattr(scenario, name) for name in ("context", "concurrency", "page_size")}
        return {
            "model": self.model.name, "origin": self.model.origin, "warning": self.model.warning, **whole,
            "dtype": scenario.activation_dtype,
            "kv_dtype": scenario.cache_dtype, "tensor_parallel": scenario.ranks,
            "token_bytes": layout.token_bytes, "groups": groups, "contexts": [asdict(row) for row in self.contexts],
            "budget": asdict(outcome.budget) | {"pool": outcome.budget.pool},
            "num_pages": outcome.num_pages, "pool_bytes": outcome.pool_bytes,
            "capacity_tokens": outcome.capacity_tokens,
            "needed": outcome.needed, "fits": outcome.fits, "missing": outcome.missing,
            "max_concurrency": outcome.max_concurrency, "max_context": outcome.max_context,
            "preemption": asdict(self.preemption) if self.preemption else None,
            "advice": [asdict(change) for change in self.advice],
            "compare": [asdict(variant) for variant in self.variants],
        }  # fmt: skip


def make_plan(
    model: PlannedModel, scenario: Scenario, lengths: Lengths | None, compare: Sequence[PlannedModel] | None
) -> Plan:
    """compare: None for no table, else the other models to put into it. ValueError: ranks cannot share the heads."""
    outcome = evaluate(scenario)
    return Plan(
        model=model,
        scenario=scenario,
        outcome=outcome,
        contexts=tuple(_at(scenario, outcome, context) for context in _contexts(scenario.context)),
        preemption=_preemption(scenario, outcome, lengths) if lengths else None,
        advice=() if outcome.fits else tuple(advise(scenario, outcome)),
        variants=() if compare is None else (*variants_of(model), *others(compare)),
    )


def _contexts(longest: int) -> list[int]:
    """Powers of 4 from 1024 that are shorter, then the longest itself."""
    return [1024 << shift for shift in range(0, 32, 2) if 1024 << shift < longest] + [longest]


def _at(scenario: Scenario, outcome: Outcome, context: int) -> AtContext:
    layout, pool = outcome.layout, outcome.budget.pool
    peak = layout.peak_pages(context, scenario.step_tokens)
    scratch = layout.pool_bytes((SCRATCH_PAGES,) * len(peak))
    seen = [context if group.window is None else min(context, group.window) for group in layout.groups]
    return AtContext(
        context=context,
        pages=layout.pages_at(context),
        page_bytes=request_bytes(layout, context),
        token_bytes=sum(tokens * group.token_bytes for tokens, group in zip(seen, layout.groups, strict=True)),
        max_concurrency=max(0, (pool - scratch) // layout.pool_bytes(peak)),
    )


def _preemption(scenario: Scenario, outcome: Outcome, lengths: Lengths) -> Preemption:
    layout, values = outcome.layout, lengths.values(scenario.context)
    needs = list(zip(*(layout.peak_pages(length, scenario.step_tokens) for length in values), strict=True))
    overflow = Overflow(needs, [count - SCRATCH_PAGES for count in outcome.num_pages])
    slots = sum(layout.pages_for(length) for length in values) * scenario.page_size
    return Preemption(
        lengths=lengths,
        cut=lengths.share_over(scenario.context),
        mean_tokens=sum(values) / len(values),
        tail_waste=1 - sum(values) / slots,
        chance=overflow.chance(scenario.concurrency),
        accepted=ACCEPTED_CHANCE,
        most=overflow.most_within(ACCEPTED_CHANCE),
    )
