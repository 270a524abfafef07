"""A plan as a picture: one device's memory, and how many requests of each length fit beside each other.

Knows matplotlib (the `plot` extra) and is imported only when a picture is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from model.kv_cost import DTYPE_BYTES
from server.plan.compare import DTYPES
from server.plan.report import size
from server.plan.result import Plan
from server.plan.waterfall import evaluate

TAKEN = {"weights": "#4c72b0", "packed_head": "#64b5cd", "workspace": "#8172b3", "reserve": "#a0a0a0"}
NEEDED, SPARE, LACKING = "#dd8452", "#55a868", "#c44e52"
SHORTEST = 128
"""Tokens at which the curves begin."""


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of path decides the format."""
    figure, (memory, load) = pyplot.subplots(1, 2, figsize=(12, 5), width_ratios=(2, 3), layout="constrained")
    figure.suptitle(f"{plan.model.name}: {plan.outcome.layout.token_bytes:,} bytes of KV cache a token on each device")
    _draw_memory(memory, plan)
    _draw_load(load, plan)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """One stacked column; what the load lacks stands above the line of the device's memory."""
    budget, needed = plan.outcome.budget, plan.outcome.needed
    pool = max(0, budget.pool)
    parts = [
        (f"{name.replace('_', ' ')}: {size(getattr(budget, name))}", getattr(budget, name), colour)
        for name, colour in TAKEN.items()
    ]
    parts.append((f"KV of the load: {size(needed)}", min(needed, pool), NEEDED))
    parts.append((f"spare: {size(pool - needed)}", max(0, pool - needed), SPARE))
    parts.append((f"lacking: {size(plan.outcome.missing)}", plan.outcome.missing, LACKING))
    bottom = 0.0
    for label, count, colour in parts:
        if count:
            axes.bar(0, count / 2**30, bottom=bottom, width=0.5, color=colour, label=label)
            bottom += count / 2**30
    axes.hlines(budget.memory / 2**30, -0.3, 0.3, color="black", label=f"memory: {size(budget.memory)}")
    axes.set(title="Memory of a device", ylabel="GiB", xticks=[], xlim=(-0.35, 1.5))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center right", frameon=False)


def _draw_load(axes: Axes, plan: Plan) -> None:
    """Requests at once over tokens of each, one curve for each dtype of the cache."""
    scenario = plan.scenario
    longest = scenario.config.max_position_embeddings
    steps = [SHORTEST << shift for shift in range(32) if SHORTEST << shift < longest]
    for dtype in sorted({*DTYPES, scenario.cache_dtype}, key=lambda name: -DTYPE_BYTES[name]):
        cast = replace(scenario, kv_dtype=dtype)
        counts = [evaluate(replace(cast, context=tokens)).max_concurrency for tokens in [*steps, longest]]
        points = [(tokens, count) for tokens, count in zip([*steps, longest], counts, strict=True) if count]
        if points:
            width = 2.5 if dtype == scenario.cache_dtype else 1.0
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=width, label=f"KV {dtype}")
    verdict = "fits" if plan.outcome.fits else "does not fit"
    axes.plot(scenario.context, scenario.concurrency, "k*", markersize=12, label=f"the load asked for: {verdict}")
    axes.set(title="Requests that run at once", xlabel="tokens of each", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
