"""Native operations where memory does not suffice: `python -m tests.native_shortage MODEL [limited]` prints, as JSON,
what each said under a limit of the system and a digest of what it made without one, afterwards.

MALLOC_MMAP_THRESHOLD_ must be set: then whatever is larger is asked of the system, which refuses it under the limit.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from model.batch import SampleBatch
from model.config import load_config
from model.ops.cpu.build import find_library
from model.ops.cpu.native import CpuOps
from model.ops.interface import AttentionTables, LayerKV
from model.weights import load_decoder
from tests.native_ops import random
from tests.test_decoder import Session, some_tokens

Call = Callable[[int], Tensor]
"""Takes how much larger than usual the work is."""
LARGE = 64
SLACK = 512 << 10
"""Bytes for what is small; every operation wants more for itself when its work is LARGE."""


def linear(ops: CpuOps, quantization: str | None, dtype: torch.dtype) -> Call:
    inputs = {size: random(24, 1024 * size, dtype=dtype) for size in (1, LARGE)}
    weights = {size: ops.pack_linear(random(33, 1024 * size, dtype=dtype), None, quantization) for size in inputs}
    return lambda size: ops.linear(inputs[size], weights[size])


def attention(ops: CpuOps) -> Call:
    """Every page of the sequence is the same one. A second thread keeps what it sums of half the keys: more than the
    64 MiB of addresses that malloc has reserved for a thread, which the limit does not see.
    """
    kv = LayerKV(*(random(2, 1, 16, 128, seed=seed) for seed in (1, 2)))
    q, starts = random(8, 12, 128), torch.tensor([0, 8], dtype=torch.int32)

    def tables(tokens: int) -> AttentionTables:
        pages = torch.ones(1, tokens // kv.page_size, dtype=torch.int32)
        return AttentionTables(pages, torch.tensor([tokens], dtype=torch.int32), starts, 8, tokens)

    by_size = {size: tables(4096 * size) for size in (1, LARGE)}
    return lambda size: ops.attention(q, kv, by_size[size], 0.1, None)


def draws(ops: CpuOps) -> Call:
    logits = {size: random(1, 8192 * size) for size in (1, LARGE)}
    return lambda size: ops.sample(logits[size], settings(temperature=1.0, num_logprobs=-1)).ids


def logprobs(ops: CpuOps) -> Call:
    """A row that is not finite reports what a row of zeros would, which it needs."""
    logits = {size: random(1, 8192 * size) for size in (1, LARGE)}
    for rows in logits.values():
        rows[0, 5] = torch.nan

    def call(size: int) -> Tensor:
        found = ops.sample(logits[size], settings(temperature=0.0, num_logprobs=2)).logprobs
        assert found is not None
        return found

    return call


def settings(temperature: float, num_logprobs: int) -> SampleBatch:
    """Of one row, which the calling thread samples."""
    zeros = torch.zeros(1, dtype=torch.int64)
    share = torch.full((1,), 0.9)
    return SampleBatch(zeros + temperature, zeros.int(), share, zeros.float(), zeros, zeros, zeros, num_logprobs)


def whole_step(ops: CpuOps, folder: Path) -> Call:
    session = Session(load_decoder(folder, load_config(folder), ops, "cpu", torch.float32))
    session.pages["a"] = [session.free.pop() for _ in range(LARGE // session.layout.page_size)]
    batches = {size: session.batch({"a": some_tokens(size)}) for size in (1, LARGE)}
    return lambda size: session.decoder.hidden(batches[size], session.kv)


@contextmanager
def limited() -> Iterator[None]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + SLACK, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(call: Call) -> str | None:
    """What a LARGE call says under a limit, once a small one has done what is done only once."""
    call(1)
    try:
        with limited():
            call(LARGE)
    except MemoryError as error:
        return str(error)
    return None


def digest(result: Tensor) -> str:
    return hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(folder: Path, is_limited: bool) -> None:
    torch.set_num_threads(2)
    ops = CpuOps(find_library())
    calls = {
        "rw_linear": linear(ops, None, torch.float32),
        "rw_linear of bf16": linear(ops, None, torch.bfloat16),
        "rw_linear_int8": linear(ops, "int8", torch.bfloat16),
        "rw_linear_int4": linear(ops, "int4", torch.float32),
        "rw_attention": attention(ops),
        "rw_sample": draws(ops),
        "rw_logprobs": logprobs(ops),
        "rw_layers": whole_step(ops, folder),
    }
    print(json.dumps({name: (is_limited and refusal(call), digest(call(LARGE))) for name, call in calls.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "limited" in sys.argv[2:])
