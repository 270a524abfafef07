"""A plan against a real engine: the pool it predicts is allocated, and the load it allows runs without preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.engine.core import Engine
from server.engine.facts import EngineConfig, EngineStats
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine
from server.plan.source import open_model
from server.plan.waterfall import Outcome, Scenario, evaluate

CONTEXT, PAGE = 64, 4


def planned(folder: Path, **changes: Any) -> tuple[Scenario, Outcome]:
    model = open_model(str(folder))
    plain = Scenario(model.config, model.tensors, 64 << 20, CONTEXT, page_size=PAGE, step_tokens=32, reserve=0)
    scenario = replace(plain, **changes)
    return scenario, evaluate(scenario)


def engine_of(folder: Path, scenario: Scenario, pool: int, max_num_seqs: int) -> Engine:
    return build_engine(
        EngineConfig(
            str(folder), device="cpu", dtype=scenario.activation_dtype, kv_cache_dtype=scenario.kv_dtype,
            page_size=PAGE, kv_cache_memory=pool, max_model_len=scenario.context, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=scenario.step_tokens,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "kv_heads", "kv_dtype"),
    [
        ("llama", 2, "auto"),
        ("llama", 6, "bfloat16"),
        ("mistral", 1, "auto"),
        ("llama", 2, "int8"),
        ("mistral", 1, "float8_e4m3fn"),
    ],
)
def test_predicted_is_allocated(tiny_model: Any, kind: str, kv_heads: int, kv_dtype: str) -> None:
    folder = tiny_model(kind, num_key_value_heads=kv_heads)
    scenario, outcome = planned(folder, concurrency=3, kv_dtype=kv_dtype)
    info = engine_of(folder, scenario, outcome.needed, max_num_seqs=3).info
    assert info.kv_bytes_predicted == info.kv_bytes_allocated == outcome.needed
    assert (info.max_model_len, info.warnings) == (CONTEXT, ())


def run_full_length(engine: Engine, concurrency: int, max_tokens: int) -> list[EngineStats]:
    """The statistics of every step of requests that grow to the context, one token of prompt each."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    for index in range(concurrency):
        engine.add(Submit(f"r{index}", Submit.pack([index + 1]), params))
    stats = []
    while engine.has_work:
        stats.append(engine.step().stats)
    return stats


def engine_with_room_for(folder: Path, concurrency: int) -> Engine:
    """An engine on a device on which exactly this many requests fit, by the plan."""
    roomy, outcome = planned(folder, concurrency=concurrency)
    scenario, outcome = planned(folder, memory=roomy.memory - outcome.budget.pool + outcome.needed)
    assert outcome.max_concurrency == concurrency
    return engine_of(folder, scenario, outcome.budget.pool, max_num_seqs=8)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_predicted_concurrency_runs_without_preemption(tiny_model: Any, kind: str) -> None:
    stats = run_full_length(engine_with_room_for(tiny_model(kind), 5), 5, CONTEXT - 1)
    assert max(step.running for step in stats) == 5
    assert stats[-1].preemptions == 0


def test_one_more_request_than_predicted_waits_or_preempts(tiny_model: Any) -> None:
    stats = run_full_length(engine_with_room_for(tiny_model("llama"), 5), 6, CONTEXT - 1)
    assert stats[-1].preemptions > 0 or any(step.waiting for step in stats)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_memory_are_those_of_the_headers_and_some_padding(tiny_model: Any, tied: bool) -> None:
    widths = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # panels of 32 rows: AVX-512's
    folder = tiny_model("llama", tie_word_embeddings=tied, **widths)
    scenario, outcome = planned(folder)
    info, budget = engine_of(folder, scenario, outcome.needed, 1).info, outcome.budget
    head = 0 if info.backend.startswith("torch") else budget.packed_head
    assert budget.weights + head <= info.weights_bytes <= 1.1 * (budget.weights + head)
