"""Rotary positions: frequencies and the table of cosines and sines.

Knows no layers; how heads are rotated belongs to the operations. Frequencies are fixed once, by the longest context
that will be served: transformers changes those of dynamic and longrope with the longest sequence of a batch, which
would make a key depend on tokens after it, and on neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import ModelConfig
from model.rope_config import RopeConfig


def inverse_frequencies(config: ModelConfig, context: int) -> Tensor:
    """Radians a position advances each of the n/2 pairs: [n/2] f32, from the fastest to the slowest.

    context: tokens of the longest sequence that will be served. Sequences in its regime get what transformers gives
    them: with longrope those that are, like context, over (or within) the original context; with dynamic those of just
    that length, or all of them where context is within max_position_embeddings.
    """
    rope, n = config.rope, config.rotary_dim
    exponents = torch.arange(0, n, 2, dtype=torch.int64).float() / n
    frequencies = 1.0 / (_theta(config, context) ** exponents)  # [n/2]
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if context > rope.original_max_position_embeddings else rope.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return frequencies


def _theta(config: ModelConfig, context: int) -> float:
    """The base; under dynamic (NTK) scaling it grows with context beyond the model's own length."""
    rope, n = config.rope, config.rotary_dim
    if rope.kind != "dynamic":
        return rope.theta
    excess = max(context, config.max_position_embeddings) / config.max_position_embeddings - 1
    return float(rope.theta * (1 + rope.factor * excess) ** (n / (n - 2)))


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by factor, short ones kept, those between blended by how often they fit the context."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Pairs that turn beta_fast times over the original context are kept, those under beta_slow stretched by factor."""
    n = 2 * len(frequencies)

    def channel(turns: float) -> float:
        waves = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return n * math.log(waves) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(n // 2, dtype=torch.float32) - low) / span).clamp(0, 1)  # [n/2]
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device | str) -> Tensor:
    """[num_positions, n] f32: n/2 cosines, then n/2 sines, scaled. Angles are fp32 products, as in transformers.

    num_positions is the longest context that will be served.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, num_positions))  # [num_positions, n/2]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * config.rope.attention_factor).to(device)


def regime_warnings(config: ModelConfig, context: int) -> tuple[str, ...]:
    """What the operator should know where the length that is served decides the frequencies of every request."""
    rope, own = config.rope, config.max_position_embeddings
    original = rope.original_max_position_embeddings
    if rope.kind == "longrope" and context > original:
        return (
            f"longrope: the long factors serve every request, since contexts of {context} tokens are over the original "
            f"{original}; short prompts do best with --max-model-len {original}",
        )
    if rope.kind == "dynamic" and context > own:
        return (f"dynamic RoPE: every request has the frequencies of {context} tokens, the model's own are {own}",)
    return ()
