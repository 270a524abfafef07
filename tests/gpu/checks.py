"""What must be right before anything is timed: kernels to float64, the model to the CPU, graphs to eager steps.

A section returns its figures, and status "wrong" where one is outside its bound.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch, SampleBatch
from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.interface import AttentionTables, LayerKV, Ops
from model.ops.reference import ReferenceOps
from model.weights import load_decoder
from server.engine.core import Engine
from server.engine.messages import SamplingParams, Submit
from server.engine.plan import Pending, StepPlan
from server.engine.sampler import dense_part, with_dense_part
from tests.fake_device import outputs
from tests.gpu.models import PAGE_SIZE, Rig, write_checkpoint
from tests.gpu.visit import Visit
from tests.real_engine import run

Section = Callable[[Visit], dict[str, Any]]
BOUND = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference to float64 over the largest value; fp32 products may use tf32, and sums run in any order."""


def verdict(errors: dict[str, float], bound: float) -> dict[str, Any]:
    worst = max(errors, key=lambda name: errors[name])
    is_right = all(error <= bound for error in errors.values())
    return {"status": "ok" if is_right else "wrong", "worst": worst, "error": errors[worst], "bound": bound}


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


def attention_error(visit: Visit, case: Case, dtype: torch.dtype) -> float:
    ops, tables = visit.ops(), case.tables(torch.device("cpu"))
    q = torch.randn(sum(new for _, new in case.spans), case.heads, case.head_dim).to(dtype)
    k, v = (torch.randn(case.num_pages, case.kv_heads, PAGE_SIZE, case.head_dim).to(dtype) for _ in range(2))
    args = case.head_dim**-0.5, case.window
    want = ReferenceOps().attention(q.double(), LayerKV(k.double(), v.double()), tables, *args)
    page_table, kv_lens, q_starts = on(visit, tables.page_table, tables.kv_lens, tables.q_starts)
    on_device = AttentionTables(page_table, kv_lens, q_starts, tables.max_q, tables.max_kv)
    kv = LayerKV(k.to(visit.device), v.to(visit.device))
    return error(ops.attention(q.to(visit.device), kv, on_device, *args), want)


def check_attention(visit: Visit) -> dict[str, Any]:
    """Decode, prefill and both in one batch."""
    dtypes = (torch.float32,) if not visit.on_gpu else (torch.bfloat16, torch.float16, torch.float32)
    errors = {
        f"{case} {dtype}": attention_error(visit, case, dtype) / BOUND[dtype]
        for case in cases(visit.tiny)
        for dtype in dtypes
    }
    return verdict(errors, 1.0)


def check_small_kernels(visit: Visit) -> dict[str, Any]:
    """Norm, activation, rotation with its write to the cache, copies of pages."""
    ops, cpu, dtype = visit.ops(), ReferenceOps(), visit.dtype
    errors: dict[str, float] = {}
    for tokens, width in ((1, 64), (17, 288), (33, 4096)):
        x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((tokens, width), (tokens, width), (width,)))
        x_there, residual_there, weight_there = on(visit, x, residual, weight)
        got = ops.add_rms_norm(x_there, residual_there, weight_there, 1e-5)[0]
        errors[f"norm {tokens}"] = error(got, cpu.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)[0])
        got = ops.silu_mul(x_there)
        errors[f"silu {tokens}"] = error(got, cpu.silu_mul(x.double()).double())
        errors |= rope_errors(visit, tokens)
    return verdict(errors, BOUND[dtype])


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
    return {f"rope {name} {tokens}": value for name, value in written.items()}


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


# ---- the model --------------------------------------------------------------------------------------------


def _checkpoint(visit: Visit, ops: Ops, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The same weights on any device, read from a folder as a server reads them."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint("toy" if visit.tiny else "stories", Path(name))
        return load_decoder(folder, load_config(folder), ops, device, dtype)


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
    cpu = torch.device("cpu")
    want_from = _checkpoint(visit, ReferenceOps(), cpu, torch.float32)
    tokens = torch.randint(0, want_from.config.vocab_size, (24 if visit.tiny else 200,))
    prompt = len(tokens) - 8
    want = logits_of(want_from, tokens, prompt, cpu)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16) if visit.on_gpu else (torch.float32,):
        decoder = _checkpoint(visit, visit.ops(), visit.device, dtype)
        got = logits_of(decoder, tokens, prompt, visit.device)
        errors[f"prefill {dtype}"] = error(got[:prompt], want[:prompt]) / BOUND[dtype]
        errors[f"decode {dtype}"] = error(got[prompt:], want[prompt:]) / BOUND[dtype]
    return verdict(errors, 3.0)  # six layers add up


# ---- graphs -----------------------------------------------------------------------------------------------


def traffic(count: int, vocab: int, longest: int) -> list[Submit]:
    """Requests of every length, sampled in several ways."""
    rng, settings = random.Random(0), [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
    return [
        Submit(
            f"r{i}", Submit.pack([rng.randrange(vocab) for _ in range(rng.randint(1, longest))]),
            SamplingParams(rng.randint(1, 24), seed=i, **settings[i % 3]),  # type: ignore[arg-type]
        )
        for i in range(count)
    ]  # fmt: skip


def watch(engine: Engine) -> None:
    """From now on torch raises where launch() would wait for a GPU."""
    runner = engine._runner
    launch = runner.launch

    def watched(plan: StepPlan) -> Pending:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched  # type: ignore[method-assign]


def _small_rig(visit: Visit, batch_invariant: bool) -> Rig:
    decoder = _checkpoint(visit, visit.ops(batch_invariant), visit.device, visit.dtype)
    return Rig.of(visit, decoder, 4096, max_num_seqs=6 if visit.tiny else 24, max_len=200, budget=64)


def check_graphs(visit: Visit) -> dict[str, Any]:
    """Engines with and without graphs say the same; with kernels that do not care about padding, every token of it.

    launch() may not wait for the device (torch says where it does).
    """
    found: dict[str, Any] = {"status": "ok"}
    for batch_invariant in (True, False):
        rig = _small_rig(visit, batch_invariant)
        submits = traffic(5 if visit.tiny else 40, rig.decoder.config.vocab_size, 30 if visit.tiny else 100)
        graphs = rig.graphs()
        replaying, eager = rig.engine(graphs), rig.engine(None)
        if visit.on_gpu:
            watch(replaying)
        a, b = outputs(run(replaying, *submits)), outputs(run(eager, *submits))
        same = sum(x == y for key in a for x, y in zip(a[key], b[key], strict=True)) / sum(map(len, a.values()))
        found["same_invariant" if batch_invariant else "same"] = round(same, 4)
    found["status"] = "ok" if found["same_invariant"] == 1 else "wrong"
    return found


def check_invariance(visit: Visit) -> dict[str, Any]:
    """--batch-invariant: what a request gets alone, log-probabilities included, it gets in a crowd, bit for bit."""
    rig = _small_rig(visit, batch_invariant=True)
    vocab = rig.decoder.config.vocab_size
    prompt = Submit.pack([i * 31 % vocab for i in range(90)])
    asked = Submit("asked", prompt, SamplingParams(16, temperature=0.9, seed=5, logprobs=2))
    alone = run(rig.engine(rig.graphs()), asked)
    crowd = run(rig.engine(rig.graphs()), *traffic(4 if visit.tiny else 30, vocab, 60), asked)
    alone_said = [(row.tokens, row.logprobs) for row in alone]
    crowd_said = [(row.tokens, row.logprobs) for row in crowd if row.id == "asked"]
    same = sum(a == b for a, b in zip(alone_said, crowd_said, strict=True)) / len(alone_said)
    return {"status": "ok" if same == 1 else "wrong", "same_rows": round(same, 4), "cut_prompt": rig.budget < 90}


CHECKS: dict[str, Section] = {
    "attention": check_attention,
    "small-kernels": check_small_kernels,
    "sampling": check_sampling,
    "model": check_model,
    "graphs": check_graphs,
    "invariance": check_invariance,
}
