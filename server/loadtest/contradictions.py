"""Options that make no sense together, and files that are not there: found before anything is sent.

Knows nothing of how options are read. Each check gives (whether it is wrong, what to say).
"""

from __future__ import annotations

import argparse
from pathlib import Path


def contradictions(options: argparse.Namespace) -> list[tuple[bool, str]]:
    modes = [bool(options.trace), options.find_capacity, options.sweep, bool(options.concurrency or options.rate)]
    names = [name for name, _ in options.compare or []]
    return [
        (not options.url and not options.compare, "name a server: ropeway bench URL (or --compare NAME=URL ...)"),
        (bool(options.url and options.compare), "give either URL or --compare NAME=URL ..., not both"),
        (len(set(names)) < len(names), "--compare: each server needs a name of its own"),
        (options.compare is not None and len(names) < 2, "--compare needs at least two servers"),
        (
            options.compare is not None and (options.find_capacity or options.sweep),
            "--compare works on --concurrency, --rate or --trace",
        ),
        (sum(modes) > 1, "choose one of --trace, --find-capacity, --sweep, or points (--concurrency, --rate)"),
        (options.find_capacity and not options.slo, "--find-capacity needs --slo, e.g. --slo ttft=500ms,tpot=50ms"),
        (
            options.num_requests is not None and options.duration is not None and not options.rate,
            "give either --num-requests or --duration",
        ),
        (
            options.prompts == "ids" and (options.api == "chat" or options.turns > 1),
            "--prompts ids needs --api completions",
        ),
        (options.turns > 1 and options.api == "completions", "several turns need --api chat"),
        (
            options.cache == "warm" and (options.trace or options.turns > 1),
            "--cache warm needs single-turn synthetic prompts",
        ),
        (not 0 < options.attain < 1, "--attain must lie between 0 and 1"),
        (options.speedup <= 0 or options.start_rate <= 0, "--speedup and --start-rate must be above 0"),
        (options.save_trace is not None and len(options.rate or []) != 1, "--save-trace records a run at one --rate"),
    ]


def unreadable(options: argparse.Namespace) -> list[tuple[bool, str]]:
    """Found out before a server is asked for anything."""
    prompts = None if options.prompts in ("words", "ids") else Path(options.prompts)
    named = {"--trace": options.trace, "--prompts (neither words nor ids)": prompts}
    return [(not path.is_file(), f"{name}: no file {path}") for name, path in named.items() if path]


def unwritable(options: argparse.Namespace) -> list[tuple[bool, str]]:
    """Found out now rather than after the run."""
    asked = (options.json, options.csv, options.markdown, options.html, options.requests, options.save_trace)
    paths = [path for path in asked if path]
    return [(not path.parent.is_dir(), f"cannot write {path}: there is no folder {path.parent}") for path in paths]
