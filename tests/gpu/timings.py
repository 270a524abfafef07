"""How fast, each figure as a share of a limit measured in the same run, against the goal of the issue.

A section returns status "ok" if the goal is met or there is none, else "missed". In small (--tiny) shares mean nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from model.ops.interface import AttentionTables, LayerKV
from model.ops.select import quantization_obstacle
from server.engine.accelerator import filler_batch
from server.engine.core import Engine
from server.engine.messages import SamplingParams, Submit
from tests.gpu.models import PAGE_SIZE
from tests.gpu.process import EngineProcess
from tests.gpu.steps import decode_seconds, rig_of, step_bytes
from tests.gpu.visit import Visit

Section = Callable[[Visit], dict[str, Any]]


def judged(share: float, goal: float | None, **facts: Any) -> dict[str, Any]:
    """goal: None of a figure that is only to be known."""
    met = goal is None or share >= goal
    return {"status": "ok" if met else "missed", "share": round(share, 3), "goal": goal} | facts


def limits(visit: Visit) -> dict[str, Any]:
    """The machine, and what it reached in this run."""
    name = torch.cuda.get_device_name() if visit.on_gpu else "cpu"
    return {
        "device": name, **versions(), "operations": visit.ops().name,
        "bandwidth_GB_s": round(visit.bandwidth / 1e9, 1), "matrix_TFLOP_s": round(visit.matrix_rate / 1e12, 2),
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    """None: not there."""
    triton = version("triton") if find_spec("triton") else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton}


# ---- steps ------------------------------------------------------------------------------------------------


def decode_alone(
    visit: Visit, name: str, goal: float | None, quantization: str | None = None, batch_invariant: bool = False
) -> dict[str, Any]:
    kv_len = 32 if visit.tiny else 1024
    if quantization is not None and (reason := not_rounded(visit, quantization)):
        return {"status": "skipped", "reason": reason}
    rig = rig_of(visit, name, 2 * kv_len, 1, 2 * kv_len, quantization, batch_invariant)
    seconds = decode_seconds(rig, rig.graphs(), 1, kv_len)
    share = step_bytes(rig, kv_len) / seconds / visit.bandwidth
    return judged(share, goal, ms=round(seconds * 1e3, 3), tokens_s=round(1 / seconds, 1))


def not_rounded(visit: Visit, quantization: str) -> str | None:
    """Why no weights are rounded here; in small Triton's interpreter rounds them."""
    if visit.on_gpu:
        return quantization_obstacle(quantization, visit.ops(), visit.device, visit.dtype, batch_invariant=False)
    return "the reference operations round no weights" if visit.ops().name == "reference" else None


def long_context(visit: Visit) -> dict[str, Any]:
    """Batch 1, 8B shape: the speed at 32k of context over that at 1k."""
    short, long = (16, 128) if visit.tiny else (1024, 32768)
    rig = rig_of(visit, "8B", long + PAGE_SIZE, 1, long + PAGE_SIZE)
    graphs = rig.graphs()
    near, far = decode_seconds(rig, graphs, 1, short), decode_seconds(rig, graphs, 1, long)
    return judged(near / far, 0.70, ms_short=round(near * 1e3, 3), ms_long=round(far * 1e3, 3))


def attention_alone(visit: Visit, rows: int, kv_len: int, goal: float) -> dict[str, Any]:
    """One layer's decode attention, 32 query heads on 8 of 128 channels; recorded, since launches may take longer."""
    rows, kv_len = (3, 40) if visit.tiny else (rows, kv_len)
    heads, kv_heads, head_dim = 32, 8, 128
    pages = rows * -(-kv_len // PAGE_SIZE)
    shape = (pages + 1, kv_heads, PAGE_SIZE, head_dim)
    kv = LayerKV(*(torch.randn(shape, device=visit.device, dtype=visit.dtype) for _ in range(2)))
    q = torch.randn(rows, heads, head_dim, device=visit.device, dtype=visit.dtype)
    tables = AttentionTables(
        (torch.randperm(pages) + 1).view(rows, -1).int().to(visit.device),
        torch.full((rows,), kv_len, dtype=torch.int32, device=visit.device),
        torch.arange(rows + 1, dtype=torch.int32, device=visit.device), 1, kv_len,
    )  # fmt: skip
    ops, capture = visit.ops(), visit.accelerator().capture
    assert capture is not None, "these operations cannot be recorded"

    def attend() -> None:
        ops.attention(q, kv, tables, head_dim**-0.5, None)

    seconds = visit.seconds(capture(attend), 1 if visit.tiny else 20)
    read = 2 * rows * kv_len * kv_heads * head_dim * kv.k.element_size()
    return judged(read / seconds / visit.bandwidth, goal, us=round(seconds * 1e6, 1))


def prefill(visit: Visit) -> dict[str, Any]:
    """2,048 tokens of one prompt, 8B shape, logits of the last; attention counts half of its square."""
    tokens = 32 if visit.tiny else 2048
    rig = rig_of(visit, "8B", tokens, 1, tokens)
    config = rig.decoder.config
    batch = filler_batch([tokens], rig.layout, 1, visit.device)
    seconds = visit.seconds(lambda: rig.decoder.forward(batch, rig.kv), 1 if visit.tiny else 3)
    head = config.vocab_size * config.hidden_size
    weights = rig.weights_read // rig.decoder.embedding.element_size() - head
    attended = 2 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
    operations = 2 * weights * tokens + 2 * head + attended
    return judged(operations / seconds / visit.matrix_rate, 0.65, ms=round(seconds * 1e3, 2))


def kernels(visit: Visit) -> dict[str, Any]:
    """Kernels that one decode step launches, divided by layers."""
    if not visit.on_gpu:
        return {"status": "skipped", "reason": "only a GPU's profiler counts kernels"}
    rig = rig_of(visit, "1B", 256, 1, 256)
    batch = filler_batch([1], rig.layout, 1, visit.device)
    rig.decoder.forward(batch, rig.kv)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rig.decoder.forward(batch, rig.kv)
        visit.wait()
    count = sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0)
    a_layer = count / rig.decoder.config.num_layers
    return {"status": "ok" if a_layer <= 10.5 else "missed", "kernels": count, "a_layer": round(a_layer, 2), "goal": 10}


# ---- the engine -------------------------------------------------------------------------------------------


def fill(engine: Engine, rows: int, prompt: int, max_tokens: int) -> None:
    """Requests that decode together, past their prompts."""
    for index in range(rows):
        params = SamplingParams(max_tokens, temperature=0)
        engine.add(Submit(f"r{index}", Submit.pack([index + 1] * prompt), params))
    while engine.scheduler.waiting or any(s.num_computed < s.prompt_len for s in engine.scheduler.running):
        engine.step()


def idle_share(visit: Visit, name: str, rows: int) -> dict[str, Any]:
    """Steady decode through the engine against the same recorded steps back to back."""
    prompt, steps = (8, 6) if visit.tiny else (512, 200)
    rows = 2 if visit.tiny else rows
    rig = rig_of(visit, name, rows * (prompt + steps + 64), rows, prompt + steps + 64)
    graphs = rig.graphs()
    busy = decode_seconds(rig, graphs, rows, prompt + steps // 2)
    engine = rig.warm_engine(graphs)
    fill(engine, rows, prompt, steps + 32)
    visit.wait()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    visit.wait()
    wall = (time.perf_counter() - started) / steps
    facts = {"ms_step": round(wall * 1e3, 3), "ms_device": round(busy * 1e3, 3), "idle": round(1 - busy / wall, 3)}
    return judged(busy / wall, 0.95, **facts)


def over_bare_loop(visit: Visit, name: str, goal: float) -> dict[str, Any]:
    """The engine in a process of its own behind its pipe, 1 and 32 streams, over the recorded steps alone."""
    prompt, steps, streams = (4, 5, (1, 2)) if visit.tiny else (512, 200, (1, 32))
    shares, facts = list[float](), dict[str, float]()
    with EngineProcess(visit, name, streams, prompt, steps) as process:
        for rows, bare in zip(streams, process.bare_seconds, strict=True):
            step = process.step_seconds(rows, prompt, steps)
            shares.append(bare / step)
            facts |= {f"ms_step_{rows}": round(step * 1e3, 3), f"ms_bare_{rows}": round(bare * 1e3, 3)}
    return judged(min(shares), goal, **facts)


def load(visit: Visit) -> dict[str, Any]:
    """256 requests, in and out uniform from 100 to 1,024: tokens a second over what the limits of every step allow."""
    count, low, high = (5, 4, 20) if visit.tiny else (256, 100, 1024)
    rig = rig_of(visit, "1B", count * 2 * high, count, 2 * high)
    engine = rig.warm_engine(rig.graphs())
    rng = random.Random(0)
    for index in range(count):
        prompt = [rng.randrange(rig.decoder.config.vocab_size) for _ in range(rng.randint(low, high))]
        params = SamplingParams(rng.randint(low, high), temperature=0)
        engine.add(Submit(f"r{index}", Submit.pack(prompt), params))
    bandwidth, matrix_rate = visit.bandwidth, visit.matrix_rate  # measured now, if no section before has asked
    least, tokens, started = 0.0, 0, time.perf_counter()
    weights = rig.weights_read // rig.decoder.embedding.element_size()
    while engine.has_work:
        output = engine.step()
        tokens += sum(len(row.tokens) for row in output.rows)
        read = step_bytes(rig, output.stats.slots_used) / bandwidth
        least += max(read, 2 * weights * output.stats.step_tokens / matrix_rate)
    visit.wait()
    wall = time.perf_counter() - started
    return judged(least / wall, 0.60, tokens_s=round(tokens / wall, 1), seconds_load=round(wall, 2))


TIMINGS: dict[str, Section] = {
    "limits": limits,
    "decode-8B": lambda visit: decode_alone(visit, "8B", 0.75),
    "decode-1B": lambda visit: decode_alone(visit, "1B", 0.60),
    "attention-64x8k": lambda visit: attention_alone(visit, 64, 8192, 0.80),
    "attention-1x32k": lambda visit: attention_alone(visit, 1, 32768, 0.40),
    "long-context": long_context,
    "prefill-2048": prefill,
    "idle-1B-1": lambda visit: idle_share(visit, "1B", 1),
    "idle-1B-64": lambda visit: idle_share(visit, "1B", 64),
    "load-256": load,
    "server-8B": lambda visit: over_bare_loop(visit, "8B", 0.95),
    "server-1B": lambda visit: over_bare_loop(visit, "1B", 0.85),
    "decode-1B-invariant": lambda visit: decode_alone(visit, "1B", None, batch_invariant=True),
    "decode-8B-int8": lambda visit: decode_alone(visit, "8B", None, "int8"),
    "decode-8B-fp8": lambda visit: decode_alone(visit, "8B", None, "fp8"),
    "kernels": kernels,  # last: a profiler leaves something behind in its process
}
