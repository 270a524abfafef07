"""What the native operations reach of what the machine gives: `python -m model.ops.cpu.bench`.

Knows shapes of models, no checkpoint: weights are random. The limits (read bandwidth, rates of dot products) are
measured in the same run; native and reference take turns; medians count. On a busy machine use --cpu-time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from model.ops.cpu.bench_parts import TimedOps, bench_parts
from model.ops.cpu.bench_report import Calls, Clock, Others, Report, measure_limits
from model.ops.cpu.bench_scene import SHAPES, Model, Scene, Shape
from model.ops.cpu.build import find_library
from model.ops.cpu.native import CpuOps
from model.ops.cpu.packed import QUANTIZED
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps

WHAT = ("linears", "attention", "step", "parts", "neighbour")
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MOST_BESIDE_A_NEIGHBOUR = 2.0
"""A busy process on one of the cores may make a step so many times as long."""


def bench_linears(report: Report, models: dict[str, Model], dtype: torch.dtype, factors: str) -> None:
    """The linear layers of all layers, one after the other: more weights than any cache holds."""
    shape = models["native"].shape
    for rows in (1, 8, 32, 128, 512):
        inputs = {width: torch.randn(rows, width).to(dtype) for _, width in shape.linears}
        calls: Calls = {name: partial(model.all_linears, inputs) for name, model in models.items()}
        work = {factors: 2.0 * rows * shape.layer_weights}
        report.line(f"linears, {rows} rows", models["native"].layer_bytes, work, calls)


def bench_attention(
    report: Report, shape: Shape, all_ops: dict[str, Ops], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Attention of all layers: decode at several contexts, a prompt, and 32 tokens of one over what is kept of it."""
    decode, prompt = ((1, 256, 1), (1, 2048, 1), (16, 512, 1)), ((1, 512, 512), (1, 256, 32), (1, 2048, 32))
    for sequences, length, asked in decode + prompt:
        scene = Scene.of(shape, sequences, length, asked, kv_dtype)
        q = torch.randn(sequences * asked, shape.config.num_heads, shape.config.head_dim).to(dtype)
        calls: Calls = {name: partial(scene.all_attention, ops, q) for name, ops in all_ops.items()}
        work = {name_of(dtype): scene.attention_flops}
        report.line(f"attention, {sequences} x {asked} of {length}", scene.kv_bytes, work, calls)


def bench_step(
    report: Report, models: dict[str, Model], dtype: torch.dtype, kv_dtype: torch.dtype, factors: str
) -> None:
    """Whole steps: decoding at contexts of 256 and 2048, and a prompt of 512."""
    shape = models["native"].shape
    for sequences, length, asked in ((1, 256, 1), (8, 256, 1), (32, 256, 1), (8, 2048, 1), (1, 512, 512)):
        scene = Scene.of(shape, sequences, length, asked, kv_dtype)
        num_bytes = models["native"].layer_bytes + models["native"].decoder.head.nbytes + scene.kv_bytes
        work = {name_of(dtype): scene.attention_flops}
        work[factors] = work.get(factors, 0) + 2 * sequences * (asked * shape.layer_weights + shape.head_weights)
        calls: Calls = {
            name: partial(model.decoder.forward, scene.batch, scene.cache) for name, model in models.items()
        }
        report.line(f"step, {sequences} x {asked} of {length}", num_bytes, work, calls)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bench_neighbour(clock: Clock, model: Model, dtype: torch.dtype) -> None:
    """A decoding step alone and beside a process that keeps one core busy, in turns."""
    scene = Scene.of(model.shape, 1, 256, 1, dtype)
    step = partial(model.decoder.forward, scene.batch, scene.cache)
    with neighbour() as pid:

        def beside() -> None:
            os.kill(pid, signal.SIGCONT)
            step()
            os.kill(pid, signal.SIGSTOP)

        times = clock.medians({"alone": step, "beside": beside})
    ratio = times["beside"] / times["alone"]
    print(f"step alone {times['alone'] * 1e3:.2f} ms, beside a busy process {times['beside'] * 1e3:.2f} ms: ", end="")
    spin = os.environ.get("GOMP_SPINCOUNT", "not set")
    print(f"{ratio:.2f} times (at most {MOST_BESIDE_A_NEIGHBOUR:g}; GOMP_SPINCOUNT {spin})")


@contextmanager
def neighbour() -> Iterator[int]:
    """A process that is busy on the first of our cores while it is let run; stopped at first."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    process.send_signal(signal.SIGSTOP)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model.ops.cpu.bench", description=__doc__)
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="135m", help="1b wants 3 GB in bf16, 6 with reference"
    )
    parser.add_argument("--only", choices=WHAT, action="append", help="repeatable; all but neighbour by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=sorted(QUANTIZED), help="of the native weights")
    parser.add_argument("--kv-cache-dtype", choices=sorted(KV_DTYPES), help="of the cache in attention and step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time instead of the wall's")
    parser.add_argument("--no-reference", action="store_true", help="native only")
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each comparison")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    run(arguments, SHAPES[arguments.shape], getattr(torch, arguments.dtype), arguments.only or WHAT[:-1])
    return 0


def run(arguments: argparse.Namespace, shape: Shape, dtype: torch.dtype, what: tuple[str, ...] | list[str]) -> None:
    """Every benchmark that is asked for, in the order of WHAT."""
    native = CpuOps(find_library())
    all_ops: dict[str, Ops] = {"native": native}
    if not arguments.no_reference:
        all_ops["reference"] = ReferenceOps()
    clock = Clock(arguments.cpu_time, arguments.seconds)
    report = Report(clock, Others())
    limits = measure_limits(clock)
    kv_dtype = KV_DTYPES.get(arguments.kv_cache_dtype, dtype)
    kind = f"{arguments.dtype}, KV {name_of(kv_dtype)}, weights {arguments.quantization or arguments.dtype}"
    print(f"{native.description}; {torch.get_num_threads()} threads; {kind}; shape of {shape.name}")
    rates = [f"{kind} {rate / 1e9:.0f} GFLOP/s" for kind, rate in limits.operations_per_second.items()]
    print(f"read {limits.bytes_per_second / 1e9:.1f} GB/s, dot products of {', '.join(rates)}", flush=True)
    factors = "int8" if arguments.quantization else arguments.dtype
    if "attention" in what:
        bench_attention(report, shape, all_ops, dtype, kv_dtype)
    if {"linears", "step", "neighbour"} & set(what):
        models = {"native": Model.of(native, shape, dtype, arguments.quantization)}
        if not arguments.no_reference:
            models["reference"] = Model.of(all_ops["reference"], shape, dtype)
        if "linears" in what:
            bench_linears(report, models, dtype, factors)
        if "step" in what:
            bench_step(report, models, dtype, kv_dtype, factors)
        if "neighbour" in what:
            bench_neighbour(clock, models["native"], dtype)
        del models
    if "parts" in what:
        bench_parts(shape, TimedOps(find_library()), dtype, arguments.quantization, arguments.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
