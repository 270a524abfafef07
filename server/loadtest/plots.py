"""The charts of the report as PNG files; the only module here that needs matplotlib.

Knows the shape of a result, not how it was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from server.loadtest.html import PALETTE, PERCENTILES, distinct, offered, quantile_points
from server.loadtest.report import Run, title

Series = dict[str, list[tuple[float, float]]]


def draw(folder: Path, result: dict[str, Any]) -> None:
    """Write latency.png, percentiles.png, timeline.png and, where the server has metrics, pool.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = distinct(result["runs"])
    chart(
        folder / "latency.png", latency_series(runs), "requests per second (offered, or served in a closed loop)", "ms"
    )
    curves = {title(run): quantile_points(run["latency"]["ttft_intended"]) for run in runs}
    chart(folder / "percentiles.png", curves, "percentile of TTFT from intended", "ms", PERCENTILES)
    times = {title(run): [(row["at"], row["tokens_per_second"]) for row in run["timeline"]] for run in runs}
    chart(folder / "timeline.png", times, "seconds", "output tokens per second")
    pool = {
        title(run): [(p["at"], p["usage"] * 100) for p in run["kv"]["points"] if "usage" in p]
        for run in runs
        if run["kv"]
    }
    if any(pool.values()):
        chart(folder / "pool.png", pool, "seconds", "% of the KV pool")


def latency_series(runs: list[Run]) -> Series:
    series: Series = {}
    for run in sorted(runs, key=offered):
        for name in ("ttft_intended", "tpot"):
            for level in ("p50", "p99"):
                key = f"{run['server']} {name} {level}".strip()
                series.setdefault(key, []).append((offered(run), run["latency"][name][level] * 1000))
    return series


def chart(path: Path, series: Series, x_label: str, y_label: str, ticks: list[tuple[float, str]] | None = None) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, points) in enumerate(series.items()):
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3, label=name, color=PALETTE[number % len(PALETTE)]
            )
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
    if ticks:
        last = max(place for points in series.values() for place, _ in points)
        ticks = [(place, text) for place, text in ticks if place <= last]
        axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
