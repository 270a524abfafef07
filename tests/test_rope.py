"""Frequencies against transformers, and what rotation must and must not change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.ops.reference import rotate
from model.rope import cos_sin_table, inverse_frequencies, regime_warnings

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
PHI3_LONG = [
    1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58, 15.66,
    15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77, 59.92,
    61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81,
]  # fmt: skip
PHI3_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9, *[2.0] * 19, 2.1, 2.1, 2.2, 2.35, 2.35,
    2.35, 2.35, 2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05,
]  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4096}
PHI3 = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": PHI3_SHORT, "long_factor": PHI3_LONG}
PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Llama-2-7B": (128, 4096, {"rope_type": "default", "rope_theta": 1e4}),
    "Llama-3.1-8B": (128, 131072, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3,
                                   "original_max_position_embeddings": 8192}),
    "Llama-3.2-1B": (64, 131072, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "factor": 32.0,
                                  "original_max_position_embeddings": 8192}),
    "Vicuna-13B-16k": (128, 4096, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "InternLM2-7B": (128, 32768, {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}),
    "Qwen2.5-7B": (128, 32768, {**YARN, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    "Yarn-Llama-2-7B-128k": (128, 131072, YARN),
    "betas": (128, 131072, {**YARN, "beta_fast": 64, "beta_slow": 2}),
    "no truncation (gpt-oss)": (64, 131072, {**YARN, "rope_theta": 150000.0, "truncate": False}),
    "mscale (DeepSeek-V2)": (64, 163840, {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "two mscales": (64, 163840, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "attention factor": (128, 131072, {**YARN, "attention_factor": 1.25}),
    "Phi-3-mini-128k": (96, 131072, PHI3 | {"original_max_position_embeddings": 4096}),
    "partial": (128, 131072, PHI3 | {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}),
    "longrope by factor": (96, 131072, PHI3 | {"original_max_position_embeddings": 4096, "factor": 8.0}),
}  # fmt: skip
"""head_dim, max_position_embeddings and scaling, as in the config.json of the checkpoints named."""


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


def of_transformers(width: int, positions: int, rope: dict[str, Any], length: int) -> tuple[Tensor, float]:
    """Inverse frequencies and attention factor for a sequence of that length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaConfig(
            hidden_size=width, num_attention_heads=1, max_position_embeddings=positions, rope_parameters=dict(rope)
        )
        if rope["rope_type"] == "default":
            return LlamaRotaryEmbedding(theirs).inv_freq, 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu", seq_len=length)
    return frequencies, float(factor)


@pytest.mark.parametrize("share", [0.02, 1.0, 1.7])
@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name: str, share: float) -> None:
    """At contexts well within, of, and over max_position_embeddings."""
    width, positions, rope = PUBLISHED[name]
    ours = config(hidden_size=width, max_position_embeddings=positions, rope_parameters=rope)
    frequencies, factor = of_transformers(width, positions, rope, int(share * positions))
    torch.testing.assert_close(inverse_frequencies(ours, int(share * positions)), frequencies, rtol=1e-6, atol=0)
    assert ours.rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["Llama-2-7B", "Vicuna-13B-16k", "Llama-3.2-1B", "Yarn-Llama-2-7B-128k"])
def test_the_table_holds_cosines_and_sines_by_the_attention_factor(name: str) -> None:
    width, positions, rope = PUBLISHED[name]
    ours = config(hidden_size=width, max_position_embeddings=positions, rope_parameters=rope)
    frequencies, factor = of_transformers(width, positions, rope, positions)
    angles = torch.outer(torch.arange(300.0), frequencies)
    want = torch.cat((angles.cos(), angles.sin()), 1) * factor
    torch.testing.assert_close(cos_sin_table(ours, 300, "cpu"), want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["InternLM2-7B", "Phi-3-mini-128k"])
def test_a_position_turns_alike_whatever_the_length_of_its_sequence(name: str) -> None:
    """Only the length that is served moves frequencies, and the operator is told."""
    width, positions, rope = PUBLISHED[name]
    ours = config(hidden_size=width, max_position_embeddings=positions, rope_parameters=rope)
    original = 4096 if name.startswith("Phi") else positions
    assert torch.equal(inverse_frequencies(ours, 7), inverse_frequencies(ours, original))
    assert not torch.equal(inverse_frequencies(ours, original), inverse_frequencies(ours, original + 1))
    assert regime_warnings(ours, original) == ()
    (warning,) = regime_warnings(ours, original + 1)
    assert str(original + 1) in warning and str(original) in warning


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(config(rope_theta=5e5), 64)
    scaled = inverse_frequencies(config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}), 64)
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
    angle = torch.tensor(7.0) * inverse_frequencies(config(), 64)
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
