"""Frequencies against transformers, and what rotation must and must not change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.ops.reference import rotate
from model.rope import cos_sin_table, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def config(**keys: Any) -> ModelConfig:
    base = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    return ModelConfig.from_dict(base | keys)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    ],
    ids=["default", "linear", "llama3"],
)
def test_table_is_that_of_transformers(rope: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaRotaryEmbedding(
            LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=4096, rope_parameters=dict(rope))
        )
    ours = config(rope_parameters=rope)
    torch.testing.assert_close(inverse_frequencies(ours), theirs.inv_freq, rtol=1e-6, atol=0)
    cos, sin = theirs(torch.zeros(1), torch.arange(300)[None])
    table = cos_sin_table(ours, 300, "cpu")
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), 1), rtol=0, atol=1e-5)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(config(rope_theta=5e5))
    scaled = inverse_frequencies(config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}))
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == 8
    assert bool((ratio.diff() >= -1e-6).all())


def score(q: Tensor, k: Tensor, q_position: int, k_position: int) -> float:
    table = cos_sin_table(config(), 64, "cpu")
    rows = [table[position].view(1, 1, -1) for position in (q_position, k_position)]
    return float((rotate(q, rows[0]) * rotate(k, rows[1])).sum())


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    assert score(q, k, 5, 2) == pytest.approx(score(q, k, 20, 17), abs=1e-4)
    assert abs(score(q, k, 5, 2) - score(q, k, 20, 10)) > 1e-2


def test_both_pairings_agree_after_the_permutation_and_not_before() -> None:
    """Adjacent pairs (2i, 2i + 1) become split-half pairs (i, i + n/2) by moving channels of q and k alike."""
    torch.manual_seed(0)
    q, k = torch.randn(64), torch.randn(64)
    angle = torch.tensor(7.0) * inverse_frequencies(config())
    pairs = torch.view_as_complex(q.view(-1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(32), angle)).flatten()
    adjacent = float(turned @ k)

    def split_half(x: Tensor) -> Tensor:
        return torch.cat((x[0::2], x[1::2])).view(1, 1, -1)

    assert score(split_half(q), split_half(k), 7, 0) == pytest.approx(adjacent, abs=1e-4)
    assert abs(score(q.view(1, 1, -1), k.view(1, 1, -1), 7, 0) - adjacent) > 1e-2


def test_channels_beyond_the_rotary_width_pass() -> None:
    heads = torch.randn(3, 2, 64)
    turned = rotate(heads, cos_sin_table(config(partial_rotary_factor=0.5), 3, "cpu").unsqueeze(1))
    assert torch.equal(turned[..., 32:], heads[..., 32:])
    assert not torch.equal(turned[1:, :, :32], heads[1:, :, :32])
