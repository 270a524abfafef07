"""The command line of the load generator, and what its words mean.

Knows nothing about running; wrong usage ends with argparse's exit code 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from server.loadtest.arrivals import parse_shape
from server.loadtest.contradictions import contradictions, unreadable, unwritable
from server.loadtest.lengths import FORMS, parse_length
from server.loadtest.slo import MLPERF, parse_duration, parse_slo
from server.loadtest.workload import SharedPrefix

T = TypeVar("T")
EPILOG = """examples:
  ropeway bench http://127.0.0.1:8000 --concurrency 1,8,32
  ropeway bench URL --rate 2,4,8 --duration 30s --slo ttft=500ms,tpot=50ms
  ropeway bench URL --rate 1:20 --duration 2m              a ramp
  ropeway bench URL --find-capacity --slo mlperf:llama3.1-8b
  ropeway bench --compare ours=URL1 vllm=URL2 --concurrency 8 --repeat 5 --html report.html
exit code: 0 measured, 1 refused, failed or limited by this client, 2 wrong usage"""


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser, with its ValueError shown by argparse as it is."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def positive(text: str) -> int:
    value = int(text) if text.strip().isdigit() else 0
    if value < 1:
        raise ValueError(f"{text!r}: expected a whole number from 1 up")
    return value


def parse_users(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse_rates(text: str) -> list[tuple[float, float]]:
    """`2,4` are two constant rates, `1:20` a ramp; requests per second."""
    return [_rate(part) for part in text.split(",")]


def _rate(text: str) -> tuple[float, float]:
    first, colon, second = text.partition(":")
    try:
        start, stop = float(first), float(second if colon else first)
    except ValueError:
        start = stop = -1.0
    if start < 0 or stop < 0 or start + stop <= 0 or start + stop == float("inf"):
        raise ValueError(f"rate {text!r}: expected requests per second above 0, or FROM:TO for a ramp")
    return start, stop


def parse_shared(text: str) -> SharedPrefix:
    """`groups=4,len=512,zipf=1.0`."""
    try:
        given = dict(part.split("=") for part in text.split(","))
        prefix = SharedPrefix(int(given.pop("groups")), int(given.pop("len")), float(given.pop("zipf", 0)))
    except (KeyError, ValueError):
        given, prefix = {"": ""}, SharedPrefix(0, 0)
    if given or prefix.groups < 1 or prefix.length < 1:
        raise ValueError(f"shared prefix {text!r}: expected groups=N,len=TOKENS and optionally ,zipf=EXPONENT")
    return prefix


def parse_named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name or not url.startswith("http"):
        raise ValueError(f"{text!r}: expected NAME=http://host:port")
    return name, url


def lasting(text: str) -> float:
    """A duration in which something can happen."""
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError(f"duration {text!r}: must be above 0")
    return seconds


def parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r}: expected a JSON object")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ropeway bench",
        usage="ropeway bench URL [options], or ropeway bench --compare NAME=URL NAME=URL ... [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure any OpenAI-compatible server. Lengths are the server's own counts.",
    )
    made.add_argument("url", nargs="?", help="address of the server, e.g. http://127.0.0.1:8000")
    _add_load(made.add_argument_group("load"))
    _add_work(made.add_argument_group("what is sent"))
    _add_judgement(made.add_argument_group("judgement"))
    _add_output(made.add_argument_group("output"))
    return made


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--concurrency", type=checked(parse_users), metavar="N,...", help="closed loop with N users (default 1,8)")
    add("--rate", type=checked(parse_rates), metavar="R,...", help="open loop at R requests per second; FROM:TO ramps")
    add(
        "--arrivals",
        type=checked(parse_shape),
        default=1.0,
        metavar="SHAPE",
        help="poisson (default), constant or gamma:SHAPE (below 1 burstier, above 1 smoother)",
    )
    add("--trace", type=Path, metavar="FILE", help="replay a trace: own JSONL or Mooncake's")
    add("--speedup", type=float, default=1.0, metavar="X", help="play a trace this many times as fast (default 1)")
    add("--find-capacity", action="store_true", help="the highest rate that still attains --slo")
    add("--sweep", action="store_true", help="one user, then many, then rates between the two throughputs")
    add("--compare", nargs="+", type=checked(parse_named), metavar="NAME=URL", help="interleave runs against each")
    add("--repeat", type=checked(positive), default=1, metavar="N", help="runs of each point (default 1)")
    add(
        "--most-users", type=checked(positive), default=32, metavar="N", help="users at the top of --sweep (default 32)"
    )
    add(
        "--num-requests",
        type=checked(positive),
        metavar="N",
        help="in a run (default 4 a user, 20 at least)",
    )
    add(
        "--duration", type=checked(lasting), metavar="TIME", help="length of a run, e.g. 30s (default with --rate: 30s)"
    )
    add("--warmup", type=int, default=1, metavar="N", help="unmeasured requests before each run (default 1)")
    add("--timeout", type=checked(lasting), default=600.0, metavar="TIME", help="of one request (default 10m)")
    add(
        "--max-in-flight",
        type=checked(positive),
        default=4096,
        metavar="N",
        help="open loop: streams at once (default 4096)",
    )
    add(
        "--max-lag",
        type=checked(lasting),
        default=0.010,
        metavar="TIME",
        help="p99 lag of this client above which a run is flagged (default 10ms)",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="NAME", help="default: the first of /v1/models")
    add("--api", choices=("completions", "chat"), help="endpoint (default completions; chat for several turns)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--prompts", default="words", metavar="SOURCE", help="words (default), ids, or a file: text or .jsonl")
    add(
        "--token-ids",
        type=checked(_id_range),
        default=(1000, 30000),
        metavar="LOW:HIGH",
        help="for --prompts ids (default 1000:30000)",
    )
    add(
        "--input-len",
        type=checked(parse_length),
        default=parse_length("128"),
        metavar="LENGTH",
        help=f"tokens (default 128): {FORMS}",
    )
    add(
        "--output-len",
        type=checked(parse_length),
        default=parse_length("64"),
        metavar="LENGTH",
        help="tokens (default 64), same forms",
    )
    add("--shared-prefix", type=checked(parse_shared), metavar="groups=G,len=N", help="prefixes shared by requests")
    add("--turns", type=checked(positive), default=1, metavar="N", help="turns of a conversation (default 1)")
    add(
        "--think",
        type=checked(parse_duration),
        default=0.0,
        metavar="TIME",
        help="pause before each later turn (default 0)",
    )
    add(
        "--cache",
        choices=("cold", "warm", "as-is"),
        default="cold",
        help="prefix cache: cold (default) = prompts never sent before, warm = a pool of prompts sent before the run",
    )
    add("--distinct", type=checked(positive), default=16, metavar="N", help="prompts of a warm cache (default 16)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (default 0)")
    add("--nonce", default="", metavar="WORD", help="of an earlier cold run, to send its prompts again")
    add("--stop-early", action="store_true", help="let the model end before --output-len (no ignore_eos)")
    add("--extra-body", type=checked(parse_object), default={}, metavar="JSON", help="merged into every request")


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not low.isdigit() or not high.isdigit() or int(low) >= int(high):
        raise ValueError(f"{text!r}: expected LOW:HIGH with LOW below HIGH")
    return int(low), int(high)


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--slo",
        type=checked(parse_slo),
        metavar="ttft=200ms,tpot=50ms",
        help=f"also e2e=, or mlperf:{'|'.join(MLPERF)}",
    )
    add(
        "--attain",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of requests that must meet the SLO (default 0.95)",
    )
    add("--start-rate", type=float, default=1.0, metavar="R", help="where --find-capacity begins (default 1 a second)")
    add(
        "--probe",
        type=checked(lasting),
        default=15.0,
        metavar="TIME",
        help="shortest probe of --find-capacity (default 15s)",
    )
    add("--discard-disturbed", action="store_true", help="take a run again if others used over 5 %% of the CPU")
    add("--budget", type=checked(lasting), default=600.0, metavar="TIME", help="of --find-capacity (default 10m)")
    add("--kv-bytes-per-token", type=float, metavar="N", help="for servers whose /metrics has blocks but not bytes")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="everything, as JSON (- for standard output instead of the tables)")
    add("--csv", type=Path, metavar="FILE", help="one row for each run")
    add("--markdown", type=Path, metavar="FILE", help="the tables")
    add("--html", type=Path, metavar="FILE", help="one self-contained report with charts")
    add("--plots", type=Path, metavar="FOLDER", help="PNG charts (needs the plot extra)")
    add("--requests", type=Path, metavar="FILE", help="a JSON line for every request, written as they end")
    add("--save-trace", type=Path, metavar="FILE", help="write the open-loop schedule and its prompts for --trace")
    add("--quiet", action="store_true", help="no progress line")


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with combinations that make no sense refused."""
    made = parser()
    options = made.parse_args(argv)
    for wrong, message in contradictions(options) + unreadable(options) + unwritable(options):
        if wrong:
            made.error(message)
    options.concurrency = options.concurrency or ([] if options.rate or options.trace else [1, 8])
    options.api = options.api or ("chat" if options.turns > 1 else "completions")
    return options
