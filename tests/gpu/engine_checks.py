"""What engines must get right before they are timed: recorded steps as eager ones, a request in a crowd as alone.

A section returns its figures, and status "wrong" where one is outside its bound.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from server.engine.core import Engine
from server.engine.messages import SamplingParams, Submit
from server.engine.plan import Pending, StepPlan
from tests.fake_device import outputs
from tests.gpu.models import Rig, checkpoint
from tests.gpu.visit import Visit
from tests.real_engine import run

SAME = {True: 1.0, False: 0.2}
"""Share of tokens; a sequence that rounds to another token goes on differently, and of garbage nothing is the same."""


def traffic(visit: Visit, count: int, vocab: int, longest: int) -> list[Submit]:
    """Requests of every length, sampled in several ways; in small a few short ones."""
    count, longest, most = (3, 10, 5) if visit.tiny else (count, longest, 24)
    rng, settings = random.Random(0), [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
    return [
        Submit(
            f"r{i}", Submit.pack([rng.randrange(vocab) for _ in range(rng.randint(1, longest))]),
            SamplingParams(rng.randint(1, most), seed=i, **settings[i % 3]),  # type: ignore[arg-type]
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
    decoder = checkpoint(visit, visit.ops(batch_invariant), visit.device, visit.dtype)
    if visit.tiny:
        return Rig.of(visit, decoder, 512, max_num_seqs=4, max_len=64, budget=16)
    return Rig.of(visit, decoder, 4096, max_num_seqs=24, max_len=200, budget=64)


def check_graphs(visit: Visit, batch_invariant: bool) -> dict[str, Any]:
    """Engines with and without graphs say the same: where kernels do not care about padding, every token of it.

    launch() may not wait for the device (torch says where it does).
    """
    rig = _small_rig(visit, batch_invariant)
    submits = traffic(visit, 40, rig.decoder.config.vocab_size, 100)
    replaying, eager = rig.engine(rig.graphs()), rig.engine(None)
    if visit.on_gpu:
        watch(replaying)
    a, b = outputs(run(replaying, *submits)), outputs(run(eager, *submits))
    same = sum(x == y for key in a for x, y in zip(a[key], b[key], strict=True)) / sum(map(len, a.values()))
    return {"status": "ok" if same >= SAME[batch_invariant] else "wrong", "same": round(same, 4)}


def check_invariance(visit: Visit) -> dict[str, Any]:
    """--batch-invariant: what a request gets alone, log-probabilities included, it gets in a crowd, bit for bit."""
    rig = _small_rig(visit, batch_invariant=True)
    vocab = rig.decoder.config.vocab_size
    length, output = (20, 5) if visit.tiny else (90, 16)
    prompt = Submit.pack([i * 31 % vocab for i in range(length)])
    asked = Submit("asked", prompt, SamplingParams(output, temperature=0.9, seed=5, logprobs=2))
    alone = run(rig.engine(rig.graphs()), asked)
    crowd = run(rig.engine(rig.graphs()), *traffic(visit, 30, vocab, 60), asked)
    alone_said = [(row.tokens, row.logprobs) for row in alone]
    crowd_said = [(row.tokens, row.logprobs) for row in crowd if row.id == "asked"]
    same = sum(a == b for a, b in zip(alone_said, crowd_said, strict=True)) / len(alone_said)
    return {"status": "ok" if same == 1 else "wrong", "same_rows": round(same, 4), "cut_prompt": rig.budget < length}
