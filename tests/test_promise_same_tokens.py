"""Promise 1: a request's tokens and log-probabilities are the same bits, whatever happens around it.

Every request of a mixed bag runs once alone and undisturbed; then the whole bag runs under each disturbance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.ops.select import ops_for, why
from server.engine.core import Engine
from server.engine.messages import Row, SamplingParams, Submit, TokenLogprob
from tests.real_engine import Setup, run

Outcome = tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...] | None, str | None]
GREEDY = SamplingParams(12, temperature=0.0, logprobs=3)
SEEDED = SamplingParams(12, temperature=0.9, seed=11, logprobs=0)


pytestmark = pytest.mark.usefixtures("one_thread")


def text(length: int, salt: int = 0) -> list[int]:
    return [(index * index * 3 + index * 7 + salt) % 256 for index in range(length)]


MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {},  # every layer sees 16 tokens
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},  # one layer all, one 12
    "phi3": {  # longrope, whose frequencies transformers changes when a sequence of the batch passes 64 tokens
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.1, 2.0, 6.0]},
    },
}
BAG = {
    "one-token": ([9], GREEDY),
    "a-page": (text(4), GREEDY),
    "a-page-and-one": (text(5), SEEDED),
    "same-prompt": (text(5), replace(SEEDED, seed=12)),
    "equal-twice": (text(21), GREEDY),
    "equal-again": (text(21), GREEDY),
    "shared-front": (text(21) + text(30, 5), replace(GREEDY, max_tokens=20)),
    "over-a-cut": (text(75, 1), replace(GREEDY, logprobs=0)),
    "seeded-long": (text(70, 1), replace(SEEDED, top_p=0.9, top_k=40)),
    "choices": (text(10, 2), replace(SEEDED, n=3, max_tokens=9)),
    "penalised": (
        text(14, 3),
        replace(SEEDED, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=5),
    ),
    "bad-words": (text(14, 3), replace(SEEDED, bad_words=((65,), (1, 2)), min_p=0.01, n=2)),
    "biased": (text(8), replace(GREEDY, logit_bias=((65, 4.0), (66, -9.0)), max_tokens=15)),
    "prompt-scores": (text(40, 4), replace(GREEDY, prompt_logprobs=2, max_tokens=6)),
    "prompt-scores-again": (text(40, 4), replace(GREEDY, prompt_logprobs=2, max_tokens=1)),
}
SUBMITS = {name: Submit(name, Submit.pack(prompt), params) for name, (prompt, params) in BAG.items()}


def outcomes(rows: list[Row]) -> dict[tuple[str, int], Outcome]:
    found: dict[tuple[str, int], Outcome] = {}
    for row in rows:
        tokens, logprobs, scored, _ = found.get((row.id, row.choice), ((), (), None, None))
        found[row.id, row.choice] = (
            tokens + row.tokens, logprobs + row.logprobs, scored or row.prompt_logprobs, row.finish,
        )  # fmt: skip
    return found


BACKENDS: dict[str, dict[str, Any]] = {
    "kernels": {},  # plain torch where there are none
    "torch": {"reference": True},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 cache": {"kv_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4", "dtype": "bfloat16"},
}


def serves(folder: Path, backend: str, setup: Setup | None = None, **how: Any) -> Engine:
    """An engine of this backend; skips, with the reason, where there are no kernels for its weights."""
    fields = BACKENDS[backend]
    if "quantization" in fields and ops_for("cpu").name != "cpu":
        pytest.skip(f"rounded weights need native kernels; here are {why('cpu')}")
    return replace(setup or Setup(), **fields).engine(folder, **how)


@cache
def undisturbed(folder: Path, backend: str = "kernels") -> dict[tuple[str, int], Outcome]:
    alone = Setup(prefix_caching=False)
    return {
        key: outcome
        for one in SUBMITS.values()
        for key, outcome in outcomes(run(serves(folder, backend, alone), one)).items()
    }


DISTURBANCES = {
    "in one batch": Setup(prefix_caching=False),
    "two at a time": Setup(max_num_seqs=2),
    "chunks of 32": Setup(budget=32),
    "chunks that never end on a page": Setup(budget=33, max_num_seqs=3),
    "chunks of 5": Setup(budget=5, max_num_seqs=4, prefix_caching=False),
    "token by token": Setup(budget=1, max_num_seqs=1),
    "pages of 16": Setup(page_size=16, pages=100),
    "preempted": Setup(pages=34),
    "preempted, no cache": Setup(pages=34, prefix_caching=False, budget=40),
    "a device that answers late": Setup(overlaps=True),
    "late and preempted": Setup(overlaps=True, pages=34, budget=48),
}


ALWAYS = ("in one batch", "chunks of 5", "chunks that never end on a page", "preempted", "late and preempted")
MATRIX = [
    pytest.param(backend, kind, name, marks=() if fast else pytest.mark.slow)
    for backend in BACKENDS
    for kind in MODELS
    for name in DISTURBANCES
    for fast in [
        (backend == "kernels" or kind == "llama") and (name in ALWAYS or (backend, kind) == ("kernels", "llama"))
    ]
]


@pytest.mark.parametrize(("backend", "kind", "name"), MATRIX)
def test_same_bits(tiny_model: Callable[..., Path], backend: str, kind: str, name: str) -> None:
    folder = tiny_model(kind, **MODELS[kind])
    engine = serves(folder, backend, DISTURBANCES[name])
    assert outcomes(run(engine, *SUBMITS.values())) == undisturbed(folder, backend)
    if "preempted" in name:
        assert engine.scheduler.num_preemptions > 0


EACH_ONCE = [("kernels", kind) for kind in MODELS] + [(other, "llama") for other in BACKENDS if other != "kernels"]


class Watched:
    """A decoder, and the most sequences that one of its forwards held."""

    widest = 0

    def around(self, decoder: Decoder) -> Watched:
        self.decoder = decoder
        return self

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        self.widest = max(self.widest, len(batch.kv_lens))
        return self.decoder.hidden(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


@pytest.mark.parametrize(("backend", "kind"), EACH_ONCE)
def test_same_bits_in_a_batch_of_32(tiny_model: Callable[..., Path], backend: str, kind: str) -> None:
    """The bag twice, so that a forward is as wide as a server's by default."""
    folder, watched = tiny_model(kind, **MODELS[kind]), Watched()
    engine = serves(folder, backend, wrap=watched.around)
    twins = [replace(submit, id=f"twin of {submit.id}") for submit in SUBMITS.values()]
    alone = undisturbed(folder, backend)
    wanted = alone | {(f"twin of {name}", choice): outcome for (name, choice), outcome in alone.items()}
    assert outcomes(run(engine, *SUBMITS.values(), *twins)) == wanted
    assert watched.widest == 32


@pytest.mark.parametrize(("backend", "kind"), EACH_ONCE)
def test_same_bits_from_a_warm_cache(tiny_model: Callable[..., Path], backend: str, kind: str) -> None:
    """Also waybarrios/vllm-mlx 775: requests one after another corrupted each other on a mixed window/full model."""
    folder = tiny_model(kind, **MODELS[kind])
    engine = serves(folder, backend)
    run(engine, *SUBMITS.values())
    hits = engine.scheduler.prefix_hits
    assert outcomes(run(engine, *reversed(SUBMITS.values()))) == undisturbed(folder, backend)
    assert engine.scheduler.prefix_hits > hits + 200


@pytest.mark.parametrize(
    "budget", [pytest.param(n, marks=() if n in (2, 3, 4, 7, 16, 29) else pytest.mark.slow) for n in range(1, 80)]
)
def test_chunks_at_every_boundary(tiny_model: Callable[..., Path], budget: int) -> None:
    folder = tiny_model("llama")
    names = ("shared-front", "prompt-scores", "seeded-long")
    rows = run(Setup(budget=budget, max_num_seqs=1).engine(folder), *(SUBMITS[name] for name in names))
    assert outcomes(rows) == {key: value for key, value in undisturbed(folder).items() if key[0] in names}


def test_same_bits_with_two_threads(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    names = ("equal-twice", "over-a-cut")
    wanted = {key: value for key, value in undisturbed(folder).items() if key[0] in names}
    torch.set_num_threads(2)
    try:
        assert outcomes(run(Setup().engine(folder), *(SUBMITS[name] for name in names))) == wanted
    finally:
        torch.set_num_threads(1)


def test_scores_do_not_depend_on_what_ran_before(tiny_model: Callable[..., Path]) -> None:
    """vLLM 42245: prompt logprobs of cached positions were whatever the buffer held."""
    folder = tiny_model("llama")
    first = Submit("first", Submit.pack(text(30)), SamplingParams(1, temperature=0.0, prompt_logprobs=1))
    second = Submit("second", Submit.pack([*text(25), 1, 2]), SamplingParams(1, temperature=0.0, prompt_logprobs=1))
    alone = outcomes(run(Setup().engine(folder), first)) | outcomes(run(Setup().engine(folder), second))
    engine = Setup().engine(folder)
    for order in ((first, second), (second, first), (first,), (second, second)):
        for submit in order:
            assert outcomes(run(engine, submit))[submit.id, 0] == alone[submit.id, 0]


def test_the_bag_tells_runs_apart(tiny_model: Callable[..., Path]) -> None:
    """The matrix would be worth little if all outputs were alike."""
    found = undisturbed(tiny_model("llama"))
    assert len({outcome[0] for outcome in found.values()}) >= len(found) - 2
