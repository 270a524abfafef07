"""Line charts as inline SVG, with no script and no dependency.

Knows numbers and labels, nothing about load tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 10, 44
COLOURS = 8  # classes c0 ... c7 of the page's style sheet
LOG_FROM = 30.0  # y values that differ by more than this factor are drawn on a logarithmic axis

Points = Sequence[tuple[float, float]]
Ticks = list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; logarithmic or linear."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (
            (log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> Ticks:
        if self.log:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            marks = [digit * 10.0**power for power in powers for digit in (1, 1.5, 2, 3, 5, 7)]
        else:
            step = nice((self.high - self.low) / 5)
            marks = [step * k for k in range(ceil(self.low / step), floor(self.high / step) + 1)]
        inside = [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]
        return [(mark, f"{mark:.6g}") for mark in inside]


def nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= step * 0.999)


def line_chart(
    title: str, series: Mapping[str, Points], x_label: str, y_label: str, x_ticks: Ticks | None = None
) -> str:
    """A figure with a legend; series without a finite point are left out. Empty text where nothing is left."""
    kept = {name: [p for p in points if isfinite(p[0]) and isfinite(p[1])] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    x, y = axes([point for points in kept.values() for point in points])
    body = grid(x, y, x_ticks or x.ticks()) + labels(x_label, y_label)
    for number, (name, points) in enumerate(kept.items()):
        body += line(name, points, x, y, number % COLOURS)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend(list(kept))}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def axes(points: list[tuple[float, float]]) -> tuple[Axis, Axis]:
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    log = min(ys) > 0 and max(ys) / min(ys) > LOG_FROM
    low, high = (min(ys) / 1.2, max(ys) * 1.2) if log else (min(0.0, *ys), max(*ys, 0.0) * 1.08 or 1.0)
    return Axis(x_low, x_high, LEFT, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def grid(x: Axis, y: Axis, x_ticks: Ticks) -> str:
    parts = []
    for value, text in y.ticks():
        height = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x_ticks:
        if x.low <= value <= x.high:
            place = x.at(value)
            parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text class="tick" x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                         f"{escape(text)}</text>")  # fmt: skip
    return "".join(parts)


def labels(x_label: str, y_label: str) -> str:
    across, up = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text text-anchor="middle" x="{across}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
        f'<text text-anchor="middle" transform="translate(14 {up}) rotate(-90)">{escape(y_label)}</text>'
    )


def line(name: str, points: Points, x: Axis, y: Axis, colour: int) -> str:
    placed = [(x.at(a), y.at(b)) for a, b in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
    drawn = f'<polyline class="c{colour}" points="{path}"/>'
    if len(points) > 60:
        return drawn
    return drawn + "".join(
        f'<circle class="c{colour}" cx="{a:.1f}" cy="{b:.1f}" r="3">'
        f"<title>{escape(name)}: {value:.4g} at {at:.4g}</title></circle>"
        for (a, b), (at, value) in zip(placed, points, strict=True)
    )


def legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    entries = (f'<span><i class="c{n % COLOURS}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="legend">{"".join(entries)}</div>'


def interval_chart(title: str, rows: list[tuple[str, float, float, float]], note: str) -> str:
    """Ratios with their intervals on a logarithmic axis around 1: (name, value, low, high), NaN where unknown."""
    kept = [row for row in rows if isfinite(row[1]) and row[1] > 0]
    if not kept:
        return ""
    ends = [v for row in kept for v in row[1:] if isfinite(v) and v > 0] + [1.0]
    x = Axis(min(ends) / 1.1, max(ends) * 1.1, 230, WIDTH - RIGHT, log=True)
    height = 24 * len(kept) + 40
    body = f'<line class="one" x1="{x.at(1):.1f}" x2="{x.at(1):.1f}" y1="4" y2="{height - 30}"/>'
    for value, text in [(v, t) for v, t in x.ticks()] or [(1.0, "1")]:
        body += f'<text class="tick" x="{x.at(value):.1f}" y="{height - 12}" text-anchor="middle">{text}</text>'
    for number, (name, value, low, high) in enumerate(kept):
        body += interval_row(name, value, low, high, 18 + 24 * number, x)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><p>{escape(note)}</p>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def interval_row(name: str, value: float, low: float, high: float, y: int, x: Axis) -> str:
    bar = ""
    if isfinite(low) and isfinite(high):
        bar = f'<line class="bar" x1="{x.at(low):.1f}" x2="{x.at(high):.1f}" y1="{y}" y2="{y}"/>'
    return (
        f'<text class="name" x="222" y="{y + 4}" text-anchor="end">{escape(name)}</text>{bar}'
        f'<circle class="c0" cx="{x.at(value):.1f}" cy="{y}" r="4"><title>{escape(name)}: {value:.3f}</title></circle>'
    )
