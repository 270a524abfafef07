"""Compiles what the Triton operations would launch, for a chip that is not there, and reports what came out.

Knows no expectations. Launches of the operations are turned into compilations, so that arguments are specialised as
they would be. `python -m tests.triton_compiler 90` prints a JSON object a kernel; with `steps` behind it, one for every
step of a server: what it compiles that none before it did. Not with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from model.batch import SampleBatch
from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from model.ops.interface import AttentionTables, LayerKV
from model.ops.scaled_linear import CODES
from model.ops.triton.ops import TritonOps
from model.ops.triton.scaled import TritonScaledLinear
from server.engine.decode_graphs import graph_sizes
from server.engine.warm_up import PROMPT_LENGTHS

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PROCESSORS = {80: 108, 90: 132}
KV_HEADS = 8


class PaperChip:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Report:
    """What one launch compiles to. Widths are bytes of global memory; local: bytes of spilled registers, a thread."""

    case: str
    kernel: str
    arch: int
    shared: int
    registers: int
    local: int
    loads: dict[int, int]  # width -> number
    copies: dict[int, int]  # asynchronous ones
    products: int  # matrix instructions


def kernels_of(launch: Callable[[], object]) -> list[Any]:
    kernels: list[Any] = []
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(original(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = original
    return kernels


def report(arch: int, case: str, kernel: Any) -> Report:
    ptx, usage = kernel.asm["ptx"], resource_usage(kernel.asm["cubin"])
    return Report(
        case, kernel.metadata.name, arch, kernel.metadata.shared, usage["REG"], usage["STACK"],
        loads=tally(vector_bytes(*match) for match in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfsu](\d+) ", ptx)),
        copies=tally(int(width, 16) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)", ptx)),
        products=len(re.findall(r"\bmma\.sync|wgmma\.mma_async", ptx)),
    )  # fmt: skip


def vector_bytes(elements: str, bits: str) -> int:
    return int(elements or 1) * int(bits) // 8


def tally(widths: Iterator[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for width in widths:
        counts[width] = counts.get(width, 0) + 1
    return counts


def resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def cache_of(head_dim: int, dtype: torch.dtype) -> LayerKV:
    name = str(dtype).removeprefix("torch.")
    group = KVGroup((0,), None, KV_HEADS, head_dim, name, 4 if dtype in (torch.int8, torch.float8_e4m3fn) else 0)
    return KVCache(KVLayout(16, (group,)), (2,), "cpu").layer(0)


def layer(
    ops: TritonOps, group: int, head_dim: int, dtype: torch.dtype, cache: torch.dtype, window: int | None,
    tokens: int = 4, sequences: int = 4, max_q: int = 64, max_kv: int = 16384,
) -> Callable[[], None]:  # fmt: skip
    """A batch through a layer's operations, a mixed one if nothing is said: prefill, decode and merge, and the rest."""
    width = KV_HEADS * group * head_dim
    kv, norm = cache_of(head_dim, cache), torch.zeros(head_dim, dtype=dtype)
    tables = AttentionTables(
        torch.ones(sequences, -(-max_kv // 16)).int(), torch.full((sequences,), 16).int(),
        torch.arange(sequences + 1).int(), max_q, max_kv,
    )  # fmt: skip
    x = torch.zeros(tokens, width, dtype=dtype)
    qkv = torch.zeros(tokens, width + 2 * KV_HEADS * head_dim, dtype=dtype)
    index, angles = torch.zeros(tokens, dtype=torch.int64), torch.zeros(16, head_dim)

    def launch() -> None:
        ops.add_rms_norm(x, x, x[0], 1e-5)
        q = ops.rope_write(qkv, norm, norm, 1e-5, angles, index, index, kv)
        ops.attention(q, kv, tables, 0.1, window)
        ops.silu_mul(qkv)
        ops.copy_pages(kv, index, index)
        if ops.batch_invariant:
            ops.linear(x, ops.pack_linear(torch.zeros(width, width, dtype=dtype), None))

    return launch


def rounded_layers() -> None:
    """The launches on either side of a product of 8-bit rows."""
    x, bias = torch.zeros(8, 4096, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    for kind, sums in zip(CODES, (torch.int32, torch.float32), strict=True):
        packed = TritonScaledLinear.pack(torch.zeros(512, 4096, dtype=torch.bfloat16), bias, kind)
        packed.rounded(x)
        packed.rescaled(torch.zeros(32, 512, dtype=sums), torch.zeros(8, 1), torch.bfloat16)


def draws() -> SampleBatch:
    plain, whole = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    return SampleBatch(plain, whole.int(), plain, plain, whole, whole, whole, num_logprobs=-1)


def cases(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The shapes of models people run, each head size once and each other property with one of them."""
    plain, invariant = TritonOps(False, PROCESSORS[arch]), TritonOps(True, PROCESSORS[arch])
    half, byte = torch.bfloat16, torch.int8
    yield "d64", layer(plain, 3, 64, half, half, None)
    yield "d80", layer(plain, 4, 80, half, half, None)
    yield "d96", layer(plain, 1, 96, half, half, None)
    yield "d128", layer(plain, 4, 128, half, half, None)
    yield "d256", layer(plain, 2, 256, half, half, None)
    yield "window", layer(plain, 4, 128, half, half, 4096)
    yield "fp16", layer(plain, 8, 128, torch.float16, torch.float16, None)
    yield "int8", layer(plain, 4, 128, half, byte, None)
    yield "fp8", layer(plain, 4, 128, half, torch.float8_e4m3fn, None)
    yield "fp32", layer(plain, 4, 64, torch.float32, torch.float32, None)
    yield "rounded", rounded_layers
    yield "sampling", lambda: plain.sample(torch.zeros(2, 128256), draws())
    yield "invariant", layer(invariant, 4, 128, half, half, None)


def steps() -> Iterator[tuple[bool, dict[str, int]]]:
    """Whether a server runs it before it is ready, and its shape: recorded decodes, prompts, then steps of clients."""
    longest = 4096
    for size in graph_sizes(4):
        yield True, {"tokens": size, "sequences": size, "max_q": 1, "max_kv": longest}
    for length in (*PROMPT_LENGTHS, longest):
        yield True, {"tokens": length, "sequences": 1, "max_q": length, "max_kv": length}
    for sequences, max_q, max_kv in itertools.product((1, 3, 16, 33), (2, 16, 100), (100, 129, 300, 1000, 4000)):
        yield False, {"tokens": sequences + max_q, "sequences": sequences, "max_q": max_q, "max_kv": max_kv}


def print_steps(arch: int) -> None:
    seen: set[str] = set()
    for ops in (TritonOps(False, PROCESSORS[arch]), TritonOps(True, PROCESSORS[arch])):
        for is_warm_up, shape in steps():
            kernels = kernels_of(layer(ops, 4, 64, torch.bfloat16, torch.bfloat16, None, **shape))
            new = {kernel.hash: kernel.metadata.name for kernel in kernels if kernel.hash not in seen}
            seen |= new.keys()
            print(json.dumps({"warm_up": is_warm_up, "shape": shape, "new": sorted(new.values())}), flush=True)


def print_reports(arch: int) -> None:
    for name, launch in cases(arch):
        for kernel in kernels_of(launch):
            print(json.dumps(asdict(report(arch, name, kernel))), flush=True)


def main() -> None:
    arch, *words = sys.argv[1:]
    driver.set_active(PaperChip(int(arch)))
    (print_steps if words == ["steps"] else print_reports)(int(arch))


if __name__ == "__main__":
    main()
