"""`ropeway convert` and `ropeway verify`: arguments in, lines or JSON out, exit code 0, 1 (refused) or 2 (usage).

Knows nothing of formats. The server's command calls these two functions lazily.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from convert.errors import ConvertError
from convert.export import EXPORTS, FILES, export
from convert.pipeline import convert as run_conversion
from convert.recheck import verify_folder
from convert.report import REPORT_FILE, table
from convert.write import SHARD_BYTES
from model.sizes import parse_size

SHOWN = 10  # problems of a folder; more of them say nothing new on a screen
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def main_convert(argv: Sequence[str]) -> int:
    """ropeway convert SRC DST."""
    parser = argparse.ArgumentParser("ropeway convert", description="Convert a checkpoint and prove the result.")
    parser.add_argument(
        "src", type=_path, metavar="SRC", help="a checkpoint in any format that is known, recognised by content"
    )
    dst_help = "the folder (or file, for gguf and llama2c) to make; it must not exist"
    parser.add_argument("dst", type=_path, metavar="DST", help=dst_help)
    dtype_help = "auto: as stored, quantised types to float32; a narrower type is proven by mean KL (at most 0.02 nats)"
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help=dtype_help)
    parser.add_argument("--to", choices=["hf", *EXPORTS], default="hf", help="hf (default): the folder that is served")
    shard_help = "--to hf: most bytes of one file, but no tensor is cut; a killed run goes on after its last whole one"
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help=f"{shard_help} (5GB)")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    args = parser.parse_args(argv)
    if args.to != "hf" and args.max_shard_size:
        parser.error(f"--max-shard-size goes with --to hf: --to {args.to} writes one file of tensors")
    return _one_line_errors(parser.prog, lambda: _convert(args))


def main_verify(argv: Sequence[str]) -> int:
    """ropeway verify DIR [--against SRC | --quantization int8]."""
    parser = argparse.ArgumentParser("ropeway verify", description="Check a converted folder again.")
    parser.add_argument("dir", type=_path, metavar="DIR", help="a folder that `ropeway convert` made")
    parser.add_argument("--against", type=_path, metavar="SRC", help="the checkpoint it was made from")
    quality_help = "what these weights cost instead: perplexity and KL against bf16, beside GGUF's q8_0 (CPU)"
    parser.add_argument("--quantization", choices=["int8", "int4", "fp8"], help=quality_help)
    parser.add_argument("--json", action="store_true", help="print the proof as JSON")
    args = parser.parse_args(argv)
    if args.quantization and args.against:
        parser.error("--against and --quantization are two questions: ask them one by one")
    return _one_line_errors(parser.prog, lambda: _quality(args) if args.quantization else _verify(args))


def _size(text: str) -> int:
    """argparse keeps the words of an ArgumentTypeError and drops those of a ValueError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _path(text: str) -> Path:
    """Path("") would be the current folder, which nobody means who passes an unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return Path(text)


def _convert(args: argparse.Namespace) -> int:
    if os.path.lexists(args.dst):
        kind = "file" if args.to in FILES else "folder"
        raise ConvertError(f"exists already{' (a link)' * args.dst.is_symlink()}: name a new {kind}", args.dst)
    if args.to != "hf":
        return _export(args)
    bar = _Bar(sys.stderr.isatty())
    report = run_conversion(args.src, args.dst, DTYPES.get(args.dtype), bar, args.max_shard_size or SHARD_BYTES)
    if report is None:
        what = "another process made it meanwhile, of this checkpoint or of another"
        raise ConvertError(f"{what}: its {REPORT_FILE} says which; or name a new folder", args.dst)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    for line in table(report):
        print(line)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report["seconds"].items())
    print(f"{args.dst}: done ({phases}); account in {REPORT_FILE}")
    return 0


def _export(args: argparse.Namespace) -> int:
    notice = _Bar(sys.stderr.isatty())
    comparison = export(args.src, args.dst, args.to, DTYPES.get(args.dtype), lambda text: notice(text, 0, 0))
    if args.json:
        print(json.dumps({"logits": asdict(comparison)}, indent=2))
    else:
        print("every tensor reads back with the values that it was written from")
        print(f"logits of source and result: {comparison.line()}")
        files = [path for path in args.dst.rglob("*") if path.is_file()] if args.dst.is_dir() else [args.dst]
        print(f"{args.dst}: done, {sum(path.stat().st_size for path in files):,} bytes")
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = verify_folder(args.dir, args.against)
    if args.json:
        row = {"proof": found.proof.as_json(), "problems": found.problems, "notes": found.notes}
        print(json.dumps(row | {"refusal": found.refusal}, indent=2))
        return 1 if found.refusal else 0
    print("\n".join([*found.proof.lines(), *found.notes, *found.problems[:SHOWN]]))
    if (more := len(found.problems) - SHOWN) > 0:
        print(f"... and {more} more (--json names all)")
    if found.refusal:
        print("REFUSED: convert the source again")
    else:
        print("verified" if found.reported else "nothing contradicts it, but there is no report to hold it to")
    return 1 if found.refusal else 0


def _quality(args: argparse.Namespace) -> int:
    from convert.quality import measure_quality  # torch: a conversion does without

    comparison = measure_quality(args.dir, args.quantization)
    print(json.dumps(comparison.as_json(), indent=2) if args.json else "\n".join(comparison.lines()))
    return 0


def _one_line_errors(name: str, command: Callable[[], int]) -> int:
    try:
        return command()
    except ConvertError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


class _Bar:
    """Progress on a terminal; notices always."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total:
            print(what, file=sys.stderr)
        elif self.terminal:
            end = "\n" if done == total else ""
            print(f"\r{what} {100 * done // total:3} %", end=end, file=sys.stderr, flush=True)
