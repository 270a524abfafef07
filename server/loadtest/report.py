"""The results as tables for a terminal or Markdown, as CSV rows and as JSON.

Knows the shape of a run's summary, not how it came about.
"""

from __future__ import annotations

import csv
import json
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from server.loadtest.measure import LATENCIES, RATES

Run = dict[str, Any]
LEVELS = ("p50", "p90", "p95", "p99")
MAX_OTHERS = 0.05
MOST_DETAILS = 6


def milliseconds(seconds: float | None) -> str:
    if seconds is None or isnan(seconds):
        return "-"
    return "inf" if seconds == inf else f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def number(value: float | None) -> str:
    if value is None or isnan(value):
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    if share is None or isnan(share):
        return "-"
    return f"{share:.2%}" if 0 < share < 0.01 else f"{share:.1%}"


def table(rows: list[list[str]], markdown: bool = False) -> str:
    """First row the heads, first column words, the rest numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    rule = ["-" * max(3, widths[0])] + ["-" * max(2, width - 1) + ":" for width in widths[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def overview(runs: list[Run], markdown: bool = False) -> str:
    """One row a run; latencies in milliseconds over successes, from the moment of sending."""
    slo = any(run["slo"] for run in runs)
    heads = [
        "load",
        "ok/sent",
        "req/s",
        "out tok/s",
        "in tok/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "ITL p99",
        "E2E p50",
        "p99",
    ]
    rows = [heads + ["goodput/s", "attained"] * slo]
    for run in runs:
        rates, latency = run["rates"], run["latency"]
        row = [title(run), f"{run['requests']['ok']}/{run['requests']['sent']}"]
        row += [number(rates[name]) for name in ("request_rate", "output_rate", "input_rate")]
        row += [milliseconds(latency[name][level]) for name in ("ttft", "tpot") for level in ("p50", "p99")]
        row += [milliseconds(latency["itl"]["p99"]), *(milliseconds(latency["e2e"][level]) for level in ("p50", "p99"))]
        rows.append(row + ([number(rates.get("goodput")), percent(rates.get("attainment"))] if slo else []))
    return table(rows, markdown)


def title(run: Run) -> str:
    return f"{run['server']} {run['label']}" if run["server"] else str(run["label"])


def detail(run: Run, markdown: bool = False) -> str:
    """All latencies of one run, failures counted as infinite beside successes only."""
    failed = run["requests"]["failed"]
    heads = ["ms", "mean", *LEVELS, "max"] + [f"{level} incl. failed" for level in LEVELS] * bool(failed)
    rows = [heads]
    for quantity in LATENCIES:
        held = run["latency"][quantity.name]
        with_failures = held.get("failures_as_infinite", {})
        row = [quantity.title, *(milliseconds(held[column]) for column in ("mean", *LEVELS, "max"))]
        rows.append(row + [milliseconds(with_failures.get(level)) for level in LEVELS] * bool(failed))
    lag = run["send_lag"]
    rows.append(
        ["client send lag", *(milliseconds(lag[column]) for column in ("mean", *LEVELS, "max"))]
        + ["-"] * (4 * bool(failed))
    )
    head = f"{title(run)}: {run['load']['kind']}, {run['requests']['sent']} requests in {run['duration']:.1f} s"
    return "\n".join(
        [
            f"### {head}\n" if markdown else head,
            table(rows, markdown),
            *([""] if markdown else []),
            *(f"- {note}" if markdown else f"  {note}" for note in notes(run)),
        ]
    )


def problems(run: Run) -> list[str]:
    """What makes the figures of a run doubtful."""
    requests, machine = run["requests"], run["machine"]
    found = [
        f"{count} failed: {kind} ({requests['first_of_each'][kind]})" for kind, count in requests["failed"].items()
    ]
    if requests["missing_done"]:
        found.append(f"{requests['missing_done']} streams had a finish_reason but no [DONE]: successes")
    if run["tokens"]["counted_by"].get("chunks"):
        found.append("the server reported no usage: tokens are chunks")
    found += [f"LIMITED BY THIS CLIENT: {reason}" for reason in run["client"]["reasons"]]
    if disturbed(run):
        found.append(f"DISTURBED: other processes used {percent(machine['others'])} of this machine's CPU (limit 5 %)")
    if run["cache"]["agrees"] is False:
        found.append(f"PREFIX CACHE NOT AS ASKED: {cache_note(run['cache'])}")
    return found


def notes(run: Run) -> list[str]:
    """What a reader must know beside the table: problems, cache, KV."""
    return [*problems(run), cache_note(run["cache"]), *kv_notes(run["kv"])]


def disturbed(run: Run) -> bool:
    others = run["machine"]["others"]
    return others is not None and others > MAX_OTHERS


def cache_note(cache: dict[str, Any]) -> str:
    share = (
        "the server reports no cached_tokens"
        if cache["cached_share"] is None
        else (f"{percent(cache['cached_share'])} of the input tokens came from it")
    )
    reset = " (reset before the run)" if cache["reset_by_server"] else ""
    return f"prefix cache {cache['asked']}{reset}: {share}"


def kv_notes(kv: dict[str, Any] | None) -> list[str]:
    if kv is None:
        return ["KV cost: no known metrics at /metrics"]
    use = f"mean {percent(kv['usage_mean'])}, peak {percent(kv['usage_peak'])}"
    if kv["usage_mean"] is None and any("usage" in point for point in kv["points"]):
        use = "not sampled, the run was shorter than a second"
    parts = [
        f"pool use {use}",
        f"{number(kv['preemptions'])} preemptions",
        f"hit rate {percent(kv['hit_rate'])}",
    ]
    if kv["pool_bytes"]:
        parts += [
            f"pool {kv['pool_bytes'] / 2**30:.2f} GiB",
            f"{number(kv['tokens_per_second_per_gib'])} tokens/s per GiB",
        ]
    if kv["bytes_per_request"]:
        parts.append(f"{kv['bytes_per_request'] / 2**20:.2f} MiB a request")
    if kv["byte_seconds_per_request"]:
        parts.append(f"{kv['byte_seconds_per_request'] / 2**20:.2f} MiB-seconds a request by the server's ledger")
    return ["KV cost: " + ", ".join(parts)]


def flagged(runs: list[Run], markdown: bool) -> str:
    """Of many runs, only what must not be overlooked."""
    return "\n".join(f"{'-' if markdown else ' '} {title(run)}: {problem}" for run in runs for problem in problems(run))


def formulas() -> str:
    """Every name with its definition."""
    lines = [f"{quantity.title}: {quantity.formula}" for quantity in LATENCIES]
    lines += [f"{name}: {formula}" for name, formula in RATES.items()]
    return "\n".join(
        [
            "client send lag: sent - intended",
            *lines,
            "p50 ... max over successes; `incl. failed` counts a failure as infinite",
        ]
    )


def text(runs: list[Run], markdown: bool = False) -> str:
    fence = "```" if markdown else ""
    shown = [detail(run, markdown) for run in runs] if len(runs) <= MOST_DETAILS else [flagged(runs, markdown)]
    blocks = [overview(runs, markdown), *filter(None, shown)]
    return "\n\n".join([*blocks, f"{fence}\n{formulas()}\n{fence}".strip()]) + "\n"


def plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: "inf" and null stand for them."""
    if isinstance(value, float) and not isfinite(value):
        return None if isnan(value) else "inf"
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    return [plain(held) for held in value] if isinstance(value, list) else value


def as_json(result: dict[str, Any]) -> str:
    definitions = {quantity.name: quantity.formula for quantity in LATENCIES} | RATES
    return json.dumps(plain({"format": "ropeway-bench-1", "definitions": definitions, **result}), indent=1)


def write_csv(path: Path, runs: list[Run]) -> None:
    """One flat row for each run; seconds and tokens per second."""
    rows = [flat(run) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def flat(run: Run) -> dict[str, Any]:
    row = {
        "server": run["server"],
        "label": run["label"],
        "kind": run["load"]["kind"],
        "duration": run["duration"],
        "sent": run["requests"]["sent"],
        "ok": run["requests"]["ok"],
        **run["rates"],
    }
    for name, held in run["latency"].items():
        row |= {f"{name}_{column}": held[column] for column in ("mean", *LEVELS, "max")}
        row |= {f"{name}_{level}_incl_failed": value for level, value in held.get("failures_as_infinite", {}).items()}
    row |= {
        "send_lag_p99": run["send_lag"]["p99"],
        "client_limited": run["client"]["limited"],
        "disturbed": disturbed(run),
    }
    return row


def capacity(found: dict[str, Any], markdown: bool = False) -> str:
    """The verdict of a search for the capacity, and its probes."""
    low, high = number(found["low"]) if found["low"] else "0", number(found["high"]) if found["high"] else "unknown"
    rate = f"{number(found['rate'])} requests/s" if found["rate"] else "none found"
    head = f"capacity under {found['slo']}, {percent(found['attain'])} attained: {rate}, 95 % interval {low} to {high}"
    rows = [["rate/s", "good/sent", "attained", "95 % interval", "runs"]]
    for probe in found["probes"]:
        share = probe["share"]
        interval = f"{percent(share['low'])} to {percent(share['high'])}"
        row = [number(probe["rate"]), f"{probe['good']}/{probe['sent']}", percent(share["value"]), interval]
        rows.append([*row, str(probe["looks"])])
    return f"{'## ' if markdown else ''}{head}\n\n{table(rows, markdown)}\n"
