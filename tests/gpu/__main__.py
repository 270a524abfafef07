"""A visit to a machine with a GPU: every check, then every timing, each in its turn: python -m tests.gpu --json FILE.

Needs torch, triton, safetensors and tokenizers, no network and no HTTP packages. Sections do not depend on each other:
a child process works them off and writes FILE after each, and where it dies (a device error spoils a process) another
goes on with the rest. --device cpu --tiny runs the same code in small on a CPU, so that it cannot rot.
Exit code 1 if a section failed or found something wrong; a missed goal is reported, not an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import CHECKS
from tests.gpu.timings import TIMINGS
from tests.gpu.visit import Visit

SECTIONS = CHECKS | TIMINGS
Results = dict[str, dict[str, Any]]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models and lengths of toys")
    parser.add_argument("--seconds", type=float, default=540, help="begin no section after this much time")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="a comma between names (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="results, written after each section")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def read(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, results: Results) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")


def run_child(args: argparse.Namespace, names: list[str]) -> None:
    """Run sections until one raises; a mark in the file tells which one was being run."""
    visit = Visit.of(args.device, args.tiny)
    for name in names:
        results = read(args.json) | {name: {"status": "began"}}
        write(args.json, results)
        started = time.monotonic()
        found = SECTIONS[name](visit)
        found = {"status": "ok"} | found | {"seconds": round(time.monotonic() - started, 1)}
        write(args.json, results | {name: found})
        print(line(name, found), flush=True)
        visit.clean_up()


def supervise(args: argparse.Namespace, names: list[str]) -> None:
    """Children until every section has an answer or the time is up."""
    deadline = time.monotonic() + args.seconds
    while names:
        left = deadline - time.monotonic()
        if left <= 0:
            write(args.json, read(args.json) | {name: {"status": "skipped", "reason": "out of time"} for name in names})
            return
        command = [sys.executable, "-m", "tests.gpu", "--child", "--device", args.device, "--json", str(args.json)]
        command += ["--sections", ",".join(names), *(["--tiny"] if args.tiny else [])]
        outcome = _wait(command, left)
        done = read(args.json)
        broken = [name for name in names if done.get(name, {}).get("status") == "began"]
        if outcome is not None and not broken:  # died before the first section
            broken = names[:1]
        write(args.json, done | {name: {"status": "failed", "reason": outcome} for name in broken})
        for name in broken:
            print(line(name, {"status": "failed", "reason": outcome}), flush=True)
        done = read(args.json)
        names = [name for name in names if name not in done]


def _wait(command: list[str], seconds: float) -> str | None:
    """None if the child ended well, else why not."""
    try:
        code = subprocess.run(command, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return "out of time"
    return None if code == 0 else f"exit code {code}: see above"


def line(name: str, found: dict[str, Any]) -> str:
    facts = {key: value for key, value in found.items() if key not in ("status", "seconds")}
    return f"{name:24} {found['status']:8} {found.get('seconds', 0):6} s  {json.dumps(facts)}"


def main() -> int:
    args = options().parse_args()
    names = args.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    if args.child:
        try:
            run_child(args, names)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    args.json.unlink(missing_ok=True)
    write(args.json, {})
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    supervise(args, names)
    results = read(args.json)
    print("\n".join(line(name, results[name]) for name in names))
    return int(any(results[name]["status"] in ("failed", "wrong") for name in names))


if __name__ == "__main__":
    sys.exit(main())
