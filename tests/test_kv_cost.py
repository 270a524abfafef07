"""Groups of layers and sizes of pools, by arithmetic alone."""

from __future__ import annotations

from typing import Any

import pytest

from model.config import ModelConfig
from model.kv_cost import KVLayout, capacity_tokens, layout_for, pages_for_sequences, pages_in_budget


def layout(page_size: int = 4, dtype: str = "float32", **keys: Any) -> KVLayout:
    raw = {
        "model_type": "qwen2",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return layout_for(ModelConfig.from_dict(raw | keys), page_size, dtype)


MIXED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def test_equal_layers_share_one_group() -> None:
    (group,) = layout().groups
    assert (group.layers, group.window, group.kv_heads, group.head_dim) == ((0, 1, 2, 3), None, 2, 8)
    assert group.token_bytes == 2 * 4 * 2 * 8 * 4


def test_windows_split_groups_in_order_of_their_first_layer() -> None:
    groups = layout(**MIXED).groups
    assert [(group.layers, group.window) for group in groups] == [((0,), None), ((1, 2, 3), 8)]


def test_a_quarter_of_the_heads_is_a_quarter_of_the_bytes() -> None:
    shape: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 32}
    many, few = layout(**shape, num_key_value_heads=32), layout(**shape, num_key_value_heads=8)
    assert many.token_bytes == 4 * few.token_bytes


def test_half_precision_halves_the_bytes() -> None:
    assert layout().token_bytes == 2 * layout(dtype="bfloat16").token_bytes


@pytest.mark.parametrize("keys", [{}, MIXED])
def test_the_pool_fills_its_budget_and_stays_in_it(keys: dict[str, Any]) -> None:
    plan = layout(**keys)
    for budget in range(plan.pool_bytes((1,) * len(plan.groups)), 200_000, 7_001):
        pages = pages_in_budget(plan, budget, max_model_len=64)
        assert plan.pool_bytes(pages) <= budget
        assert budget - plan.pool_bytes(pages) < sum(plan.page_bytes(group) for group in range(len(plan.groups)))


def test_a_budget_below_the_scratch_pages_leaves_them_alone() -> None:
    assert pages_in_budget(layout(**MIXED), 0, max_model_len=64) == (1, 1)


def test_enough_for_every_sequence() -> None:
    assert pages_for_sequences(layout(), num_seqs=3, max_model_len=10) == (1 + 3 * 3,)
    whole, windowed = pages_for_sequences(layout(**MIXED), num_seqs=2, max_model_len=1000, chunk=16)
    assert whole == 1 + 2 * 250
    assert windowed == 1 + 2 * 7  # 8 - 1 + 16 tokens touch at most 7 pages of 4


def test_what_fits_in_the_budget_of_a_full_batch_is_the_full_batch() -> None:
    for plan in (layout(), layout(**MIXED)):
        pages = pages_for_sequences(plan, num_seqs=5, max_model_len=64)
        assert pages_in_budget(plan, plan.pool_bytes(pages), max_model_len=64) == pages


def test_capacity_leaves_out_scratch_and_windows() -> None:
    assert capacity_tokens(layout(), (10,)) == 36
    assert capacity_tokens(layout(**MIXED), (10, 4)) == 36
    assert capacity_tokens(layout(**MIXED, layer_types=["sliding_attention"] * 4), (4,)) == 12
