"""The options of `ropeway plan`, once: flags, ROPEWAY_* environment, --help and docs/plan.md derive from this table.

Knows no model and no arithmetic: it only reads and checks values.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.kv_cost import DTYPE_ALIASES, DTYPE_BYTES
from model.sizes import parse_size
from server.plan.lengths import Lengths

WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
PICTURES = (".png", ".svg", ".pdf")
KV_DTYPES = ("auto", *DTYPE_BYTES, *DTYPE_ALIASES)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def size_or_auto(text: str) -> int | None:
    """None for auto."""
    return None if text == "auto" else parse_size(text)


def weight_dtype(text: str) -> str:
    return one_of(WEIGHT_DTYPES, text)


def kv_dtype(text: str) -> str:
    return DTYPE_ALIASES.get(one_of(KV_DTYPES, text), text)


def one_of(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return text


def lengths(text: str) -> Lengths:
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"{text!r} is not P50,P95 in tokens (example: 800,4000)")
    p50, p95 = (positive(part.strip()) for part in parts)
    if p50 > p95:
        raise ValueError(f"{text!r}: the 95th percentile must not be below the median")
    return Lengths(p50, p95)


def picture(text: str) -> Path:
    if not text.endswith(PICTURES):
        raise ValueError(f"{text!r} must end in one of {', '.join(PICTURES)}")
    return Path(text)


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. spellings: ours, then that of `ropeway serve`, which names the variable: both read one environment."""

    spellings: tuple[str, ...]
    metavar: str
    help: str
    parse: Callable[[str], Any] = str
    default: str | None = None

    @property
    def variable(self) -> str:
        return "ROPEWAY_" + self.spellings[-1].removeprefix("--").replace("-", "_").upper()

    @property
    def field(self) -> str:
        """Where argparse keeps it."""
        return self.spellings[0].removeprefix("--").replace("-", "_")

    @property
    def text(self) -> str:
        """What --help and docs/plan.md say."""
        known = "" if self.default is None else f", default {self.default}"
        return f"{self.help} (env {self.variable}{known})"


MODEL_HELP = "folder, config.json, .gguf file or what convert reads; the demo model if left out"
OPTIONS = (
    Option(("--context", "--max-model-len"), "TOKENS", "prompt + output; the model's longest if left out", positive),
    Option(("--concurrency", "--max-num-seqs"), "N", "requests that run at once", positive, "1"),
    Option(("--page-size",), "TOKENS", "tokens of a KV page", positive, "16"),
    Option(("--kv-dtype", "--kv-cache-dtype"), "DTYPE", "of the KV cache; auto is the model's", kv_dtype, "auto"),
    Option(("--dtype",), "DTYPE", "auto: the checkpoint's, bfloat16 for float32", weight_dtype, "auto"),
    Option(("--tensor-parallel", "--tensor-parallel-size"), "N", "devices that share each layer", positive, "1"),
    Option(("--memory",), "SIZE|auto", "of one device, e.g. 24GiB; auto: what is free here", size_or_auto, "auto"),
    Option(("--reserve",), "SIZE|auto", "left to the runtime; auto: 5 % of it, 512MiB or more", size_or_auto, "auto"),
    Option(("--step-tokens", "--max-num-batched-tokens"), "N", "tokens of one forward", positive, "512"),
    Option(("--lengths",), "P50,P95", "median and 95th percentile of prompt + output: chance of preemption", lengths),
)  # fmt: skip
COMPARE = Option(("--compare",), "MODEL", "table of MHA, GQA and MQA in every KV dtype, and of other models if named")
PLOT = Option(("--plot",), "FILE", "draw the plan into this .png, .svg or .pdf (needs the plot extra)", picture)
JSON_FLAG, JSON_HELP = "--json", "print one JSON object, bytes as integers"


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse keeps the words of an ArgumentTypeError and drops those of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def parse(argv: list[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Flag, else environment, else default; wrong usage ends with exit code 2 and names the flag or the variable."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    if parsed.compare and parsed.model is None:
        parser.error("--compare takes every name that follows it: put MODEL first (ropeway plan MODEL --compare OTHER)")
    for option in OPTIONS:
        if hasattr(parsed, option.field):
            continue
        given = environment.get(option.variable)
        try:
            value = given or option.default
            setattr(parsed, option.field, None if value is None else option.parse(value))
        except ValueError as error:
            parser.error(f"{option.variable}: {error}")
    return parsed


def make_parser() -> argparse.ArgumentParser:
    """A parser of the flags; what is not given is not in its result."""
    parser = argparse.ArgumentParser(
        prog="ropeway plan",
        description="What a model's KV cache costs and how much of it fits, from headers alone: no weights are read.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    for option in OPTIONS:
        parser.add_argument(
            *option.spellings, metavar=option.metavar, help=option.text.replace("%", "%%"), type=checked(option.parse),
            default=argparse.SUPPRESS,
        )  # fmt: skip
    parser.add_argument(*COMPARE.spellings, nargs="*", metavar=COMPARE.metavar, help=COMPARE.help)
    parser.add_argument(*PLOT.spellings, metavar=PLOT.metavar, help=PLOT.help, type=checked(picture))
    parser.add_argument(JSON_FLAG, action="store_true", help=JSON_HELP)
    return parser
