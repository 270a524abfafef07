"""The cache of one model with other numbers of KV heads and other dtypes, and of other models, side by side.

Knows no devices: bytes of one token, all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.config import ModelConfig
from model.kv_cost import layout_for
from server.plan.source import PlannedModel

FORMULA = "2 (K, V) * layers * KV heads * (head_dim * bytes of the dtype + scale)"
DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Variant:
    """token_bytes: one per entry of DTYPES. ratio: of the cache of full multi-head attention, same dtype."""

    name: str
    kv_heads: int
    layers: int
    head_dim: int
    token_bytes: tuple[int, ...]
    ratio: float


def variants_of(model: PlannedModel) -> list[Variant]:
    """MHA, GQA at every halving of the heads, MQA; the model itself is named."""
    config = model.config
    counts = {config.num_heads, config.num_kv_heads, 1}
    counts |= {heads for heads in (8, 4, 2) if heads < config.num_heads and config.num_heads % heads == 0}
    return [_variant(config, _attention_name(config, heads), heads) for heads in sorted(counts, reverse=True)]


def others(models: Sequence[PlannedModel]) -> list[Variant]:
    return [_variant(model.config, model.name, model.config.num_kv_heads) for model in models]


def _attention_name(config: ModelConfig, kv_heads: int) -> str:
    kind = "MHA" if kv_heads == config.num_heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
    return f"{kind} (this model)" if kv_heads == config.num_kv_heads else kind


def _variant(config: ModelConfig, name: str, kv_heads: int) -> Variant:
    shaped = replace(config, num_kv_heads=kv_heads)
    token_bytes = tuple(layout_for(shaped, 1, dtype).token_bytes for dtype in DTYPES)
    return Variant(name, kv_heads, config.num_layers, config.head_dim, token_bytes, kv_heads / config.num_heads)
