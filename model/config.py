"""The one reader of config.json: what a decoder is, in plain numbers.

Knows no tensors and no weights; imports neither torch nor numpy, so that a plan needs milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from model.json_values import ConfigError as ConfigError
from model.json_values import Json, agreed, number, optional, positive, require, token_ids
from model.rope_config import RopeConfig as RopeConfig
from model.rope_config import check_width, read_rope

DEEPEST = 10_000  # layers
LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOWLESS_LAYERS = 28  # max_window_layers, where the key is missing


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type implies beyond the keys it writes."""

    qkv_bias: bool | None = False  # None: as attention_bias says
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the key is missing; None: hidden_size / num_attention_heads
    sliding_window: int | None = None  # where the key is missing
    windows: bool = True  # sliding_window counts
    window_switch: bool = False  # only under use_sliding_window, from max_window_layers on
    layer_types: bool = False  # may differ from layer to layer
    fused: bool = False  # q, k, v are one matrix in the file, and so are gate and up
    rms_norm_eps: float = 1e-6  # where the key is missing
    positions: int = 2048  # max_position_embeddings, where the key is missing
    original_positions: int | None = None  # original_max_position_embeddings, where the key is missing


FAMILIES = {
    "llama": Family(qkv_bias=None, o_bias=None, mlp_bias=None, windows=False),
    "mistral": Family(sliding_window=4096, layer_types=True, positions=131072),
    "phi3": Family(fused=True, rms_norm_eps=1e-5, positions=4096, original_positions=4096),
    "qwen2": Family(qkv_bias=True, sliding_window=4096, window_switch=True, layer_types=True, positions=32768),
    "qwen3": Family(
        qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, sliding_window=4096, window_switch=True,
        layer_types=True, positions=32768,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. windows[i]: tokens layer i can see (itself included), None for all of them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    attention_scale: float
    bos_token_id: int | None

    @property
    def rotary_dim(self) -> int:
        """Leading channels of a head that rotate; the rest pass through."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def longest_context(self) -> int:
        """Tokens a sequence may have where that is asked for: a scaling can reach beyond max_position_embeddings."""
        return max(self.max_position_embeddings, self.rope.reach(self.max_position_embeddings))

    @classmethod
    def from_dict(cls, raw: Json) -> ModelConfig:
        """Read a parsed config.json of transformers 4 or 5. Raises ConfigError."""
        model_type = require(raw, "model_type", str)
        if model_type not in FAMILIES:
            raise ConfigError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[model_type]
        hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
        head_dim = _head_dim(raw, family, hidden, heads)
        bias = optional(raw, "attention_bias", bool, False)
        positions = positive(raw, "max_position_embeddings", default=family.positions)
        config = cls(
            model_type=model_type,
            vocab_size=positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=positive(raw, "intermediate_size"),
            num_layers=positive(raw, "num_hidden_layers", most=DEEPEST),
            num_heads=heads,
            num_kv_heads=positive(raw, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            rms_norm_eps=number(raw, "rms_norm_eps", family.rms_norm_eps),
            max_position_embeddings=positions,
            tie_word_embeddings=optional(raw, "tie_word_embeddings", bool, False),
            dtype=agreed(raw, ("dtype", "torch_dtype"), "float32").removeprefix("torch."),
            rope=_rope(raw, family, positions),
            windows=_windows(raw, family),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            mlp_bias=optional(raw, "mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            fused=family.fused,
            attention_scale=head_dim**-0.5,
            bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
        )
        _check(config, raw)
        return config


def served_dtype(stored: str) -> str:
    """What "auto" makes of a checkpoint's dtype: float32 is served in bfloat16, half the memory and bandwidth."""
    return "bfloat16" if stored == "float32" else stored


def load_config(folder: Path) -> ModelConfig:
    """Read folder/config.json. Raises ConfigError, for a missing or broken file too."""
    return ModelConfig.from_dict(_read_json(folder / "config.json"))


def _read_json(path: Path) -> Json:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a model folder needs it") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, expected an object")
    return raw


def _check(config: ModelConfig, raw: Json) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise ConfigError(
            f"rotary width {config.rotary_dim} (head_dim {config.head_dim} * partial_rotary_factor "
            f"{config.rope.partial_rotary_factor}) must be even and within the head"
        )
    check_width(config.rope, config.rotary_dim)
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported; known: silu")


def _head_dim(raw: Json, family: Family, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return positive(raw, "head_dim")
    if family.head_dim is not None:
        return family.head_dim
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not set"
        )
    return hidden // heads


def _windows(raw: Json, family: Family) -> tuple[int | None, ...]:
    layers = positive(raw, "num_hidden_layers", most=DEEPEST)
    window = raw.get("sliding_window", family.sliding_window)
    if not family.windows or (family.window_switch and not raw.get("use_sliding_window", False)):
        window = None
    if window is not None:
        window = positive({"sliding_window": window}, "sliding_window")
    first = optional(raw, "max_window_layers", int, WINDOWLESS_LAYERS) if family.window_switch else 0
    usual = [LAYER_TYPES[window is not None and layer >= first] for layer in range(layers)]
    kinds = raw.get("layer_types", usual) or usual
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise ConfigError(f"layer_types must name {layers} layers, each one of {', '.join(LAYER_TYPES)}; got {kinds}")
    if not family.layer_types and kinds != usual:
        raise ConfigError(f"layer_types of a {raw['model_type']} must be {usual[0]} in every layer; got {kinds}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: Json, family: Family, positions: int) -> RopeConfig:
    """What a family takes for the original context counts as if the file said it at the top level."""
    original = raw.get("original_max_position_embeddings") or family.original_positions
    return read_rope({**raw, "original_max_position_embeddings": original}, positions)
