"""One self-contained HTML report: verdicts, tables, charts, definitions; no script, nothing fetched.

Knows the shape of a result, not how it was measured.
"""

from __future__ import annotations

from html import escape
from math import isfinite, log10
from typing import Any

from server.loadtest.charts import Points, interval_chart, line_chart
from server.loadtest.measure import LATENCIES, RATES
from server.loadtest.report import LEVELS, Run, milliseconds, notes, number, percent, problems, title

STYLE = """
:root{--ink:#1d2530;--soft:#5b6675;--line:#dde2e8;--page:#fbfcfd;--card:#fff;--bad:#b3261e;--badback:#fdecea}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b5;--line:#2c3440;--page:#12161c;--card:#191f27;
--bad:#ff8a80;--badback:#3a1d1c}}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;
max-width:1240px;padding:24px}h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 10px}p{margin:4px 0}
.soft,figure p{color:var(--soft);font-size:13px}.flag{background:var(--badback);color:var(--bad);padding:8px 12px;
border-radius:6px;margin:8px 0}.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;
font-size:13px;background:var(--card)}th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:8px}
figcaption{font-weight:600}svg{width:100%;height:auto;display:block}.legend{display:flex;flex-wrap:wrap;gap:2px 14px;
font-size:12px;color:var(--soft)}.legend i{display:inline-block;width:14px;height:3px;margin-right:5px;
vertical-align:middle}text{font:11px system-ui,sans-serif;fill:var(--soft)}.name{fill:var(--ink)}
.grid{stroke:var(--line)}.one{stroke:var(--soft);stroke-dasharray:3 3}.bar{stroke:#2f6fd0;stroke-width:3}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}summary{cursor:pointer;font-weight:600;padding:6px 0}
dt{font-weight:600}dd{margin:0 0 4px 0;color:var(--soft)}pre{overflow-x:auto;font-size:12px}
"""
PALETTE = ("#2f6fd0", "#d9622b", "#2a9d6f", "#9556c9", "#c2a012", "#c93a6a", "#3aa6b9", "#7a7f87")
MOST_TIMELINES = 6
MOST_FLAGS = 4
HEADINGS = {quantity.name: quantity.title for quantity in LATENCIES}


def colours() -> str:
    rules = (
        f"polyline.c{n}{{stroke:{c}}}circle.c{n}{{fill:{c}}}i.c{n}{{background:{c}}}" for n, c in enumerate(PALETTE)
    )
    return "".join(rules)


def page(result: dict[str, Any], tables: str) -> str:
    """The whole report; `tables` is the text of the terminal, kept for copying."""
    runs = result["runs"]
    first = runs[0]
    servers = ", ".join(dict.fromkeys(f"{run['server']} {run['url']} ({run['model']})".strip() for run in runs))
    body = [
        f"<h1>Load test</h1><p class=soft>{escape(servers)} · {escape(first['started'])} · {escape(first['api'])} · "
        f"SLO {escape(first['slo'] or 'none')} · prefix cache {escape(first['cache']['asked'])}</p>",
        flags(runs), capacity(result.get("capacity")), comparison(result.get("summary")),
        "<h2>Runs</h2>", overview(runs), f'<div class="charts">{"".join(charts(runs))}</div>',
        "<h2>Each run</h2>", *(details(run) for run in runs), definitions(),
        f"<details><summary>As text</summary><pre>{escape(tables)}</pre></details>",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Load test</title><style>{STYLE}{colours()}</style><body>{''.join(body)}</body></html>\n"
    )


def flags(runs: list[Run]) -> str:
    """What makes a figure doubtful, before the figures."""
    found = [f"{title(run)}: {problem}" for run in runs for problem in problems(run)]
    lines = [f'<p class="flag">{escape(text)}</p>' for text in found]
    more = f"<details><summary>{len(lines) - MOST_FLAGS} more</summary>{''.join(lines[MOST_FLAGS:])}</details>"
    return "".join(lines[:MOST_FLAGS]) + (more if len(lines) > MOST_FLAGS else "")


def capacity(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = (number(found[end]) if found[end] else "not reached" for end in ("low", "high"))
    points = [(probe["rate"], probe["share"]["value"] * 100) for probe in found["probes"]]
    edges = {edge: [(p["rate"], p["share"][edge] * 100) for p in found["probes"]] for edge in ("low", "high")}
    series = {"good / sent": points, "interval low": edges["low"], "interval high": edges["high"]}
    chart = line_chart("attainment against offered rate", series, "requests per second", "% within the SLO")
    rate = f"{number(found['rate'])} requests/s" if found["rate"] else "none found"
    return (
        f"<h2>Capacity: {rate}</h2><p>{escape(found['slo'])}, {percent(found['attain'])} attained; 95 % interval "
        f'{low} to {high} requests/s</p><div class="charts">{chart}</div>'
    )


def comparison(rows: list[dict[str, Any]] | None) -> str:
    rows = [row for row in rows or [] if row["ratio"]]
    if not rows:
        return ""
    charts = []
    for label, server in dict.fromkeys((row["label"], row["server"]) for row in rows):
        held = [(row["figure"], *row["ratio"]) for row in rows if (row["label"], row["server"]) == (label, server)]
        note = f"{server} / {rows[0]['base']}, paired by round, with 95 % intervals; 1 = no difference"
        charts.append(interval_chart(f"{label}: {server} against {rows[0]['base']}", held, note))
    return f'<h2>Ratios</h2><div class="charts">{"".join(charts)}</div>'


def html_table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def overview(runs: list[Run]) -> str:
    slo = any(run["slo"] for run in runs)
    heads = "run|loop|ok / sent|req/s|out tok/s|in tok/s|TTFT p50|TTFT p99|TPOT p50|TPOT p99|ITL p99|E2E p99"
    rows = [heads.split("|") + ["goodput/s", "attained"] * slo]
    for run in runs:
        rates, latency = run["rates"], run["latency"]
        cells = [title(run), run["load"]["kind"], f"{run['requests']['ok']} / {run['requests']['sent']}"]
        cells += [number(rates[name]) for name in ("request_rate", "output_rate", "input_rate")]
        cells += [milliseconds(latency[name][level]) for name in ("ttft", "tpot") for level in ("p50", "p99")]
        cells += [milliseconds(latency["itl"]["p99"]), milliseconds(latency["e2e"]["p99"])]
        rows.append(cells + [number(rates.get("goodput")), percent(rates.get("attainment"))] * slo)
    return html_table(rows) + "<p class=soft>latencies in milliseconds, successes only, from sent</p>"


def details(run: Run) -> str:
    rows = [["ms", "mean", *LEVELS, "max", *(f"{level} incl. failed" for level in LEVELS)]]
    for quantity in LATENCIES:
        held = run["latency"][quantity.name]
        failures = held.get("failures_as_infinite", {})
        cells = [milliseconds(held[column]) for column in ("mean", *LEVELS, "max")]
        rows.append([quantity.title, *cells, *(milliseconds(failures.get(level)) for level in LEVELS)])
    remarks = "".join(f"<li>{escape(note)}</li>" for note in notes(run))
    head = f"{title(run)} · {run['load']['kind']} · {run['requests']['sent']} requests in {run['duration']:.1f} s"
    return f"<details><summary>{escape(head)}</summary>{html_table(rows)}<ul class=soft>{remarks}</ul></details>"


def definitions() -> str:
    names = {quantity.title: quantity.formula for quantity in LATENCIES} | RATES
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(formula)}</dd>" for name, formula in names.items())
    return f"<h2>Definitions</h2><dl>{entries}</dl>"


def charts(runs: list[Run]) -> list[str]:
    """Latency against load, the percentiles, and what happened along the time."""
    found = []
    for name in ("ttft_intended", "tpot", "e2e_intended"):
        found.append(against_load(runs, name, HEADINGS[name]))
    for name in ("ttft_intended", "itl", "e2e_intended"):
        series = {title(run): quantile_points(run["latency"][name]) for run in distinct(runs)}
        found.append(line_chart(f"{HEADINGS[name]}: percentiles", series, "percentile", "ms", PERCENTILES))
    shown = distinct(runs)[:MOST_TIMELINES]
    found.append(along_time(shown, "tokens_per_second", "output tokens per second", 1.0))
    found.append(along_time(shown, "ttft_mean", "mean TTFT from intended, ms, by end of request", 1000.0))
    pool = {
        title(run): [(p["at"], p["usage"] * 100) for p in run["kv"]["points"] if "usage" in p]
        for run in shown
        if run["kv"]
    }
    found.append(line_chart("KV pool use", pool, "seconds", "% of the pool"))
    return found


def distinct(runs: list[Run]) -> list[Run]:
    """The last run of each title: repeated rounds would be drawn over each other."""
    return list({title(run): run for run in runs}.values())


def against_load(runs: list[Run], name: str, heading: str) -> str:
    closed = all(run["load"]["kind"] == "closed loop" for run in runs)
    series: dict[str, Points] = {}
    for server in dict.fromkeys(run["server"] for run in runs):
        own = [run for run in distinct(runs) if run["server"] == server]
        for level in ("p50", "p99"):
            points = [
                (run["load"]["concurrency"] if closed else offered(run), run["latency"][name][level] * 1000)
                for run in own
            ]
            series[f"{server} {level}".strip()] = sorted(points)
    axis = "users (closed loop)" if closed else "offered requests per second (of a closed loop: those served)"
    many = max((len(points) for points in series.values()), default=0) > 1
    return line_chart(f"{heading} against load", series, axis, "ms") if many else ""


def offered(run: Run) -> float:
    rate = run["load"]["rate"]
    return float(run["rates"]["request_rate"] if rate is None else rate)


def nines(level: float) -> float:
    return -log10(1 - level)


PERCENTILES = [(nines(level / 100), f"p{level:g}") for level in (0, 50, 75, 90, 95, 99, 99.9)]


def quantile_points(held: dict[str, Any]) -> list[tuple[float, float]]:
    return [(nines(level), value * 1000) for level, value in held["curve"] if isfinite(value)]


def along_time(runs: list[Run], name: str, heading: str, scale: float) -> str:
    series = {
        title(run): [(row["at"], row[name] * scale) for row in run["timeline"] if row[name] is not None] for run in runs
    }
    return line_chart(heading, series, "seconds", heading.split(",")[0])
