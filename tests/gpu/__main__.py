"""A visit to a machine with a GPU: every check, then every timing: python -m tests.gpu --json FILE.

Needs torch, triton, safetensors and tokenizers, no network and no HTTP packages. Checks need no quiet device and run
side by side, as they mostly compile; timings then run alone. FILE is written after each section. One that raises, kills
its process or hangs is failed, and the others go on. --device cpu --tiny runs the same code in small on a CPU, so that
it cannot rot. Exit code 1 if a section failed or found something wrong, 2 for wrong arguments, 130 for Ctrl-C; a missed
goal is reported, not an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.gpu.checks import CHECKS
from tests.gpu.lanes import Bounds, Found, Lane, work_off
from tests.gpu.sections import SECTIONS, run_sections


def options() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models and lengths of toys")
    parser.add_argument("--seconds", type=float, default=540, help="end after so much time (default: %(default)s)")
    parser.add_argument(
        "--longest", type=float, default=180, help="seconds after which a section has failed (default: %(default)s)"
    )
    parser.add_argument(
        "--lanes", type=positive, default=max(1, cores // 2), help="checks side by side (default: half the cores)"
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help="a comma between names (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="results, written after each section")
    return parser


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def checked(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Options and sections; ends the process where the visit could not begin, or its results not be kept."""
    args = parser.parse_args()
    names = [name.strip() for name in args.sections.split(",")]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU here; --device cpu --tiny runs the same in small")
    if args.device == "cuda" and find_spec("triton") is None:
        parser.error("triton is not installed, so there are no kernels to visit; pip install 'ropeway[gpu]'")
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("{}\n")
    except OSError as error:
        parser.error(f"--json {args.json} cannot be written: {error.strerror}; name another file")
    return args, names


def turns(names: list[str], lanes: int) -> list[list[list[str]]]:
    """What runs side by side, turn by turn: checks dealt out to lanes, then all timings in one."""
    checks, timings = ([name for name in names if (name in CHECKS) == is_check] for is_check in (True, False))
    return [[checks[lane::lanes] for lane in range(min(lanes, len(checks)))], [timings] if timings else []]


def visit(args: argparse.Namespace, names: list[str]) -> dict[str, Found]:
    """Results by name, also in the file."""
    results: dict[str, Found] = {}

    def report(name: str, found: Found) -> None:
        results[name] = found
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(line(name, found), flush=True)

    bounds, work = Bounds(time.monotonic() + args.seconds, args.longest), partial(run_sections, args.device, args.tiny)
    for lanes in turns(names, args.lanes):
        work_off([Lane(some, work, bounds, report) for some in lanes])
    return results


def line(name: str, found: Found) -> str:
    facts = {key: value for key, value in found.items() if key not in ("status", "seconds")}
    return f"{name:24} {found['status']:8} {found.get('seconds', 0):6} s  {json.dumps(facts)}"


def summary(args: argparse.Namespace, results: dict[str, Found]) -> str:
    counts = Counter(found["status"] for found in results.values())
    parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{len(results)} sections: {parts}; {args.json}" + ("; in small, shares mean nothing" if args.tiny else "")


def main() -> int:
    args, names = checked(options())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children of other groups end with this process
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    try:
        results = visit(args, names)
    except KeyboardInterrupt:
        print(f"interrupted; sections that had ended are in {args.json}", file=sys.stderr)
        return 130
    print("\n".join(["", *(line(name, results[name]) for name in names), summary(args, results)]))
    return int(any(found["status"] in ("failed", "wrong") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
