"""Several runs of one load put together: means over rounds, and ratios between servers.

Knows the shape of a run's summary, no server. Ratios are paired by round, so what disturbs a whole round cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

from server.loadtest.report import Run, milliseconds, number, table
from server.loadtest.stats import Interval, mean_interval, ratio_interval


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure worth comparing; `latency` ones are seconds, the others rates."""

    title: str
    path: tuple[str, ...]

    def of(self, run: Run) -> float:
        value: Any = run
        for name in self.path:
            value = value.get(name, float("nan"))
        return float(value)

    def show(self, value: float) -> str:
        return f"{milliseconds(value)} ms" if self.path[0] == "latency" else number(value)


COMPARED = (
    Compared("requests/s", ("rates", "request_rate")),
    Compared("output tokens/s", ("rates", "output_rate")),
    Compared("goodput/s", ("rates", "goodput")),
    Compared("TTFT p50", ("latency", "ttft", "p50")),
    Compared("TTFT p99", ("latency", "ttft", "p99")),
    Compared("TPOT p50", ("latency", "tpot", "p50")),
    Compared("ITL p99", ("latency", "itl", "p99")),
    Compared("E2E p50", ("latency", "e2e", "p50")),
)


def grouped(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by (label, server), each list in the order of its rounds."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: int(run["round"])):
        groups.setdefault((run["label"], run["server"]), []).append(run)
    return groups


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """For every load, server and figure: mean over the rounds, and the ratio to the first server of the run."""
    groups = grouped(runs)
    base = runs[0]["server"]
    rows = []
    for (label, server), held in groups.items():
        for figure in COMPARED:
            values = [figure.of(run) for run in held]
            if all(isnan(value) for value in values):
                continue
            against = [figure.of(run) for run in groups[label, base]]
            ratio = ratio_interval(values, against) if server != base else None
            rows.append({"label": label, "server": server, "figure": figure.title, "rounds": len(values),
                         "mean": mean_interval(values), "ratio": ratio, "base": base, "show": figure.show})  # fmt: skip
    return rows


def bounds(interval: Interval, show: Any) -> str:
    return "-" if isnan(interval.low) else f"{show(interval.low)} to {show(interval.high)}"


def text(runs: list[Run], markdown: bool = False) -> str:
    """The table of means and ratios with 95 % intervals."""
    several = len({run["server"] for run in runs}) > 1
    heads = ["load", *["server"] * several, "figure", "rounds", "mean", "95 % interval"]
    rows = [heads + [f"ratio to {runs[0]['server']}", "95 % interval"] * several]
    for row in summary(runs):
        cells = [row["label"], *[row["server"]] * several, row["figure"], str(row["rounds"])]
        cells += [row["show"](row["mean"].value), bounds(row["mean"], row["show"])]
        if several:
            ratio = row["ratio"]
            cells += ["1", ""] if ratio is None else [f"{ratio.value:.3f}", bounds(ratio, lambda value: f"{value:.3f}")]
        rows.append(cells)
    note = "" if rows[1:] and int(rows[1][2 + several]) > 1 else "\none round says nothing about spread: use --repeat\n"
    return table(rows, markdown) + "\n" + note


def as_rows(runs: list[Run]) -> list[dict[str, Any]]:
    """The summary as plain data."""
    plain = []
    for row in summary(runs):
        ratio, mean = row.pop("ratio"), row.pop("mean")
        row.pop("show")
        plain.append(row | {"mean": [mean.value, mean.low, mean.high],
                            "ratio": ratio and [ratio.value, ratio.low, ratio.high]})  # fmt: skip
    return plain
