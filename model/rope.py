"""Rotary positions: frequencies and the table of cosines and sines.

Knows no layers; how heads are rotated belongs to the operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import ModelConfig, RopeConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position advances each of the n/2 pairs: [n/2] f32, from the fastest to the slowest."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequencies = 1.0 / (config.rope.theta**exponents)  # [n/2]
    if config.rope.kind == "linear":
        return frequencies / config.rope.factor
    if config.rope.kind == "llama3":
        return _llama3(frequencies, config.rope)
    assert config.rope.kind == "default", config.rope.kind
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by factor, short ones kept, those between blended by how often they fit the context."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device | str) -> Tensor:
    """[num_positions, n] f32: n/2 cosines, then n/2 sines. Angles are fp32 products, as in transformers."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))  # [num_positions, n/2]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
