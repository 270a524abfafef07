"""What must be right before anything is timed: kernels to float64, the model to the CPU, graphs to eager steps.

A section returns its figures, and status "wrong" where one is outside its bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch, SampleBatch
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.attention_choice import PACKAGES, Served, usable
from model.ops.interface import AttentionTables, LayerKV
from model.ops.quantised_kv import dequantise, quantise
from model.ops.reference import ReferenceOps
from model.ops.scaled_linear import CODES, FP8_CAPABILITY, ScaledLinear, obstacle
from server.engine.sampler import dense_part, with_dense_part
from tests.gpu.engine_checks import check_graphs, check_invariance
from tests.gpu.models import PAGE_SIZE, checkpoint
from tests.gpu.tally import Tally
from tests.gpu.visit import Visit

Section = Callable[[Visit], dict[str, Any]]
BOUND = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference to float64 over the largest value; fp32 products may use tf32, and sums run in any order."""
LAST = 8
"""Tokens of a sequence that are decoded one by one."""


def on(visit: Visit, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(visit.device) for tensor in tensors]


def error(got: Tensor, want: Tensor) -> float:
    """got on any device against want in float64; NaN counts as infinite."""
    difference = (got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-9)
    return float(difference.nan_to_num(nan=float("inf")))


# ---- kernels ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sequences of (cached, new) tokens."""

    spans: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def tables(self, device: torch.device) -> AttentionTables:
        """Pages in a random order, none shared, none of them page 0."""
        lens = [cached + new for cached, new in self.spans]
        width = max(-(-length // PAGE_SIZE) for length in lens)
        pages = torch.randperm(len(lens) * width) + 1
        starts = torch.tensor([0, *(new for _, new in self.spans)]).cumsum(0)
        return AttentionTables(
            pages.view(len(lens), width).int().to(device), torch.tensor(lens, dtype=torch.int32, device=device),
            starts.int().to(device), max(new for _, new in self.spans), max(lens),
        )  # fmt: skip

    @property
    def num_pages(self) -> int:
        return 1 + len(self.spans) * max(-(-(cached + new) // PAGE_SIZE) for cached, new in self.spans)


def cases(tiny: bool) -> list[Case]:
    long, many = (70, 2) if tiny else (5000, 33)
    decode = tuple((length, 1) for length in (0, 1, 15, 16, 63, 64, 65, long))
    mixed = ((0, 40), (long, 1), (17, 20), (100, 1), (0, 1))
    found = [Case(decode, 8, 2, 64), Case(mixed, 8, 2, 64), Case(mixed, 4, 4, 128, window=50)]
    if tiny:
        return found
    found += [Case(((300, 1),) * many, 32, 8, 128), Case(((long, 1),), 32, 8, 128), Case(((0, 1500),), 32, 8, 128)]
    found += [Case(spans, 6, 2, head_dim) for spans in (decode, mixed) for head_dim in (80, 96, 256)]
    return found


def attention_errors(visit: Visit, case: Case, dtype: torch.dtype) -> dict[str, float]:
    ops, tables = visit.ops(), case.tables(torch.device("cpu"))
    q = torch.randn(sum(new for _, new in case.spans), case.heads, case.head_dim).to(dtype)
    k, v = (torch.randn(case.num_pages, case.kv_heads, PAGE_SIZE, case.head_dim).to(dtype) for _ in range(2))
    args = case.head_dim**-0.5, case.window
    want = ReferenceOps().attention(q.double(), LayerKV(k.double(), v.double()), tables, *args)
    page_table, kv_lens, q_starts = on(visit, tables.page_table, tables.kv_lens, tables.q_starts)
    on_device = AttentionTables(page_table, kv_lens, q_starts, tables.max_q, tables.max_kv)
    kv = LayerKV(k.to(visit.device), v.to(visit.device))
    return {"out": error(ops.attention(q.to(visit.device), kv, on_device, *args), want)}


def check_attention(visit: Visit, dtype: torch.dtype) -> dict[str, Any]:
    """Decode, prefill and both in one batch."""
    tally = Tally(f"attention, {dtype}", BOUND[dtype])
    for case in cases(visit.tiny):
        tally.add(str(case), partial(attention_errors, visit, case, dtype))
    return tally.verdict()


def check_small_kernels(visit: Visit) -> dict[str, Any]:
    """Norm, activation, rotation with its write to the cache, copies of pages."""
    tally = Tally("small kernels", BOUND[visit.dtype])
    for tokens, width in ((1, 64), (17, 288), (33, 4096)):
        tally.add(f"norm and activation, {tokens} rows", partial(row_errors, visit, tokens, width))
        tally.add(f"rotation, {tokens} rows", partial(rope_errors, visit, tokens))
    return tally.verdict()


def row_errors(visit: Visit, tokens: int, width: int) -> dict[str, float]:
    ops, cpu, dtype = visit.ops(), ReferenceOps(), visit.dtype
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((tokens, width), (tokens, width), (width,)))
    x_there, residual_there, weight_there = on(visit, x, residual, weight)
    normed = ops.add_rms_norm(x_there, residual_there, weight_there, 1e-5)[0]
    want = cpu.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)[0]
    return {"norm": error(normed, want), "silu": error(ops.silu_mul(on(visit, x)[0]), cpu.silu_mul(x.double()))}


def rope_errors(visit: Visit, tokens: int) -> dict[str, float]:
    heads, kv_heads, head_dim, pages = 6, 2, 64, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(visit.dtype)
    angles = torch.randn(200, head_dim // 2)
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.randint(0, 200, (tokens,))
    slots = torch.randperm((pages - 1) * PAGE_SIZE)[:tokens] + PAGE_SIZE
    shape = (pages, kv_heads, PAGE_SIZE, head_dim)
    oracle = LayerKV(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    cache = LayerKV(*(torch.zeros(shape, dtype=visit.dtype, device=visit.device) for _ in range(2)))
    want = ReferenceOps().rope_write(qkv.double(), None, None, 1e-5, cos_sin, positions, slots, oracle)
    qkv, cos_sin, positions, slots = on(visit, qkv, cos_sin, positions, slots)
    got = visit.ops().rope_write(qkv, None, None, 1e-5, cos_sin, positions, slots, cache)
    source, target = torch.tensor([1, 2], device=visit.device), torch.tensor([6, 7], device=visit.device)
    written = {"q": error(got, want), "k": error(cache.k, oracle.k), "v": error(cache.v, oracle.v)}
    visit.ops().copy_pages(cache, source, target)
    written["copy"] = 0.0 if torch.equal(cache.k[6:8], cache.k[1:3]) else float("inf")
    return written


def check_sampling(visit: Visit) -> dict[str, Any]:
    """The same seeds draw the same tokens as the reference, but where two sums round apart at a threshold."""
    rows, vocab = (9, 300) if visit.tiny else (64, 32000)
    logits, each = 3 * torch.randn(rows, vocab), torch.arange(rows)
    batch = SampleBatch(
        temperature=(each % 3) * 0.5, top_k=(each % 4 * 20).int(), top_p=1 - 0.1 * (each % 2), min_p=0.02 * (each % 5),
        seed=each + 11, choice=each % 2, index=each * 3, num_logprobs=5,
    )  # fmt: skip
    want = ReferenceOps().sample(logits.clone(), batch)
    there = with_dense_part(batch, on(visit, *dense_part(batch)))
    got = visit.ops().sample(logits.to(visit.device), there)
    assert got.top_logprobs is not None and want.top_logprobs is not None
    same = float((got.ids.cpu() == want.ids).double().mean())
    apart = error(got.top_logprobs, want.top_logprobs.double())
    is_right = same >= 0.98 and apart <= 1e-4 and bool(got.finite.all())
    return {"status": "ok" if is_right else "wrong", "same": round(same, 4), "logprobs": apart}


def check_rounded_layers(visit: Visit) -> dict[str, Any]:
    """Products of int8 and fp8 against those of the same rounded matrices in float64, few rows and many."""
    tally = Tally("rounded layers", BOUND[torch.bfloat16])
    capability = torch.cuda.get_device_capability() if visit.on_gpu else FP8_CAPABILITY
    for kind, rows, width in itertools.product(CODES, (1, 17, 40), (96,) if visit.tiny else (4096, 14336)):
        if obstacle(kind, batch_invariant=False, capability=capability) is None:
            tally.add(f"{kind}, {rows} rows of {width}", partial(rounded_errors, visit, kind, rows, width))
    return tally.verdict()


def rounded_errors(visit: Visit, kind: str, rows: int, width: int) -> dict[str, float]:
    weight, x = torch.randn(200, width).bfloat16(), torch.randn(rows, width).bfloat16()
    left, right = (dequantise(*quantise(matrix, CODES[kind])).double() for matrix in (x, weight))
    packed = type_of_layer(visit).pack(weight.to(visit.device), None, kind)
    return {"out": error(packed(x.to(visit.device), torch.bfloat16), left @ right.T)}


def type_of_layer(visit: Visit) -> type[ScaledLinear]:
    """A GPU's, or its twin in plain torch."""
    if visit.ops().name == "reference":
        return ScaledLinear
    layer: type[ScaledLinear] = import_module("model.ops.triton.scaled").TritonScaledLinear
    return layer


def check_packages(visit: Visit) -> dict[str, Any]:
    """Attention of other packages against ours, where they are installed: what the start of a server would say."""
    capability = torch.cuda.get_device_capability() if visit.on_gpu else (9, 0)
    served = Served(torch.bfloat16, torch.bfloat16, 32, 8, 128, PAGE_SIZE, (None, 50))
    found = {
        name: usable(name, visit.ops().attention, served, visit.device, capability, batch_invariant=False)
        for name in PACKAGES
    }
    return {"status": "ok"} | {name: it if isinstance(it, str) else "agrees" for name, it in found.items()}


# ---- the model --------------------------------------------------------------------------------------------


def one_sequence(tokens: Tensor, start: int, device: torch.device) -> Batch:
    """Tokens start ... of one sequence, on pages 1, 2, ...; logits of all."""
    end = start + len(tokens)
    positions = torch.arange(start, end)
    table = torch.arange(1, 2 + end // PAGE_SIZE, dtype=torch.int32).unsqueeze(0)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return Batch(
        tokens.to(device), positions.to(device), ((positions + PAGE_SIZE).to(device),), (table.to(device),),
        torch.tensor([end], dtype=torch.int32, device=device), bounds.to(device),
        torch.arange(len(tokens), device=device), len(tokens), end,
    )  # fmt: skip


def logits_of(decoder: Decoder, tokens: Tensor, prompt: int, device: torch.device) -> Tensor:
    """[T, V] on the host: a prompt in one forward, the rest token by token."""
    dtype = str(decoder.embedding.dtype).removeprefix("torch.")
    kv = KVCache(layout_for(decoder.config, PAGE_SIZE, dtype), (len(tokens) // PAGE_SIZE + 2,), device)
    spans = [(0, prompt), *((at, at + 1) for at in range(prompt, len(tokens)))]
    pieces = [decoder.forward(one_sequence(tokens[a:b], a, device), kv) for a, b in spans]
    return torch.cat(pieces).double().cpu()


def check_model(visit: Visit) -> dict[str, Any]:
    """A stories-size checkpoint: prefill and decode against the CPU reference in fp32."""
    want_from = checkpoint(visit, ReferenceOps(), torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, want_from.config.vocab_size, (24 if visit.tiny else 200,))
    want = logits_of(want_from, tokens, len(tokens) - LAST, torch.device("cpu"))
    tally = Tally("model", 3.0)  # six layers add up
    for dtype in (torch.float32, torch.bfloat16) if visit.on_gpu else (torch.float32,):
        tally.add(str(dtype), partial(model_errors, visit, dtype, tokens, want))
    return tally.verdict()


def model_errors(visit: Visit, dtype: torch.dtype, tokens: Tensor, want: Tensor) -> dict[str, float]:
    """In steps of BOUND."""
    prompt = len(tokens) - LAST
    got = logits_of(checkpoint(visit, visit.ops(), visit.device, dtype), tokens, prompt, visit.device)
    spans = {"prefill": slice(0, prompt), "decode": slice(prompt, len(tokens))}
    return {name: error(got[span], want[span]) / BOUND[dtype] for name, span in spans.items()}


CHECKS: dict[str, Section] = {
    "attention-bf16": partial(check_attention, dtype=torch.bfloat16),
    "attention-fp16": partial(check_attention, dtype=torch.float16),
    "attention-fp32": partial(check_attention, dtype=torch.float32),
    "graphs-invariant": partial(check_graphs, batch_invariant=True),
    "graphs": partial(check_graphs, batch_invariant=False),
    "invariance": check_invariance,
    "model": check_model,
    "sampling": check_sampling,
    "rounded-layers": check_rounded_layers,
    "small-kernels": check_small_kernels,
    "packages": check_packages,
}
"""The longest first: they are dealt out to lanes in this order."""
