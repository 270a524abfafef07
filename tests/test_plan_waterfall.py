"""What the plan promises, checked against real pools and by turning each screw: fits means fits, one more does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.config import ModelConfig
from model.kv_cache import KVCache
from model.kv_cost import SCRATCH_PAGES, pages_for_sequences, pages_in_budget
from server.plan.advice import advise
from server.plan.shapes import tensors_of
from server.plan.waterfall import Scenario, evaluate, required_memory

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "torch_dtype": "float32",
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {}, "mha": {"num_key_value_heads": 8}, "mqa": {"num_key_value_heads": 1},
    "window": {"model_type": "mistral", "sliding_window": 24}, "mixed": WINDOWS,
}  # fmt: skip


def scenario(kind: str = "gqa", **changes: Any) -> Scenario:
    config = ModelConfig.from_dict(TINY | KINDS[kind])
    plain = Scenario(
        config, tensors_of(config), memory=8 << 20, context=200, reserve=1 << 20, page_size=4, step_tokens=16
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_predicted_is_allocated_to_the_byte(kind: str, dtype: str, page_size: int, ranks: int) -> None:
    outcome = evaluate(scenario(kind, kv_dtype=dtype, page_size=page_size, ranks=ranks))
    assert KVCache(outcome.layout, outcome.num_pages, "cpu").nbytes == outcome.pool_bytes <= outcome.budget.pool


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_of_the_launch_line_holds_exactly_the_load(kind: str) -> None:
    load = scenario(kind, concurrency=7)
    outcome = evaluate(load)
    pages = pages_for_sequences(outcome.layout, 7, load.context, load.step_tokens)
    assert pages_in_budget(outcome.layout, outcome.needed, load.context, load.step_tokens) == pages
    assert KVCache(outcome.layout, pages, "cpu").nbytes == outcome.needed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_maxima_fit_and_one_more_does_not(kind: str, page_size: int) -> None:
    load = scenario(kind, concurrency=9, page_size=page_size, memory=3 << 20)
    outcome = evaluate(load)
    assert outcome.max_concurrency > 0
    assert evaluate(replace(load, concurrency=outcome.max_concurrency)).fits
    assert not evaluate(replace(load, concurrency=outcome.max_concurrency + 1)).fits
    assert evaluate(replace(load, context=outcome.max_context)).fits
    if outcome.max_context < 512:
        assert not evaluate(replace(load, context=outcome.max_context + 1)).fits


def test_a_pool_filled_to_the_maximum_has_no_room_for_another() -> None:
    outcome = evaluate(scenario(memory=3 << 20))
    pages = outcome.layout.peak_pages(200, 16)[0]
    assert (outcome.num_pages[0] - SCRATCH_PAGES) // pages == outcome.max_concurrency


@pytest.mark.parametrize("kind", KINDS)
def test_each_advised_change_is_enough_and_the_smallest(kind: str) -> None:
    load = scenario(kind, concurrency=20, page_size=16)
    roomy = evaluate(load)
    load = replace(load, memory=roomy.budget.memory - roomy.budget.pool + roomy.needed * 3 // 10)
    outcome = evaluate(load)
    assert not outcome.fits
    advice = advise(load, outcome)
    enough = [change for change in advice if change.missing == 0]
    assert {"memory", "concurrency", "context"} <= {change.setting for change in enough}
    assert {change.setting: change.new for change in advice}["kv_dtype"] == "int8"
    assert [change.factor for change in enough] == sorted(change.factor for change in enough)
    assert advice[: len(enough)] == enough
    for change in enough:
        changed: dict[str, Any] = {change.setting: change.new}
        assert evaluate(replace(load, **changed)).fits
        if change.setting in ("memory", "concurrency", "context"):
            less: dict[str, Any] = {change.setting: int(change.new) + (-1 if change.setting == "memory" else 1)}
            assert not evaluate(replace(load, **less)).fits


def test_the_gain_of_a_change_is_what_the_device_then_lacks_less() -> None:
    load = scenario(concurrency=20, memory=2 << 20)
    outcome = evaluate(load)
    for change in advise(load, outcome):
        assert change.gain >= outcome.missing or change.missing == outcome.missing - change.gain


def test_a_smaller_dtype_shrinks_the_cache_that_follows_it() -> None:
    load = scenario(concurrency=20, memory=2 << 20)
    change = {change.setting: change for change in advise(load, evaluate(load))}["dtype"]
    both = evaluate(load).needed // 2 + evaluate(load).budget.weights // 2
    assert change.gain > both  # and the activations
    assert (change.old, change.new) == ("float32", "bfloat16")


@pytest.mark.parametrize("reserve", [None, 0, 10 << 20])
def test_required_memory_is_exact(reserve: int | None) -> None:
    for concurrency in (1, 50_000):
        load = scenario(concurrency=concurrency, reserve=reserve)
        enough = required_memory(load, evaluate(load))
        assert evaluate(replace(load, memory=enough)).fits
        assert not evaluate(replace(load, memory=enough - 1)).fits


def test_ranks_divide_matrices_copy_vectors_and_repeat_kv_heads() -> None:
    alone, eight = scenario(), scenario(ranks=8)
    kv = sum(tensor.stored_bytes for tensor in alone.tensors if "k_proj" in tensor.name or "v_proj" in tensor.name)
    vectors = sum(tensor.stored_bytes for tensor in alone.tensors if len(tensor.shape) == 1)
    matrices = alone.weights() - kv - vectors
    assert eight.weights() == vectors + kv // 2 + sum(
        -(-tensor.stored_bytes // 8)
        for tensor in alone.tensors
        if len(tensor.shape) == 2 and "k_proj" not in tensor.name and "v_proj" not in tensor.name
    )
    assert eight.weights() < vectors + kv // 2 + matrices // 8 + len(alone.tensors)


def test_more_memory_than_none_is_needed_before_anything_fits() -> None:
    outcome = evaluate(scenario(memory=1000))
    assert (outcome.max_concurrency, outcome.max_context, outcome.capacity_tokens) == (0, 0, 0)
    assert not outcome.fits
