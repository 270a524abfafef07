"""The one reader of config.json: what a decoder is, in plain numbers.

Knows no tensors and no weights; imports neither torch nor numpy, so that a plan needs milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Json = Mapping[str, Any]
T = TypeVar("T")

ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Every rotary scaling we compute, with the numbers it cannot do without."""

LAYER_TYPES = ("full_attention", "sliding_attention")


class ConfigError(ValueError):
    """A config.json that cannot be served: the message names the key, its value and what is accepted."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type implies beyond the keys it writes."""

    qkv_bias: bool | None = False  # None: as attention_bias says
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the key is missing; None: hidden_size / num_attention_heads
    sliding_window: int | None = None  # where the key is missing
    window_switch: bool = False  # windows count only under use_sliding_window, from max_window_layers on


FAMILIES = {
    "llama": Family(qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Family(sliding_window=4096),
    "qwen2": Family(qkv_bias=True, window_switch=True),
    "qwen3": Family(qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, window_switch=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. Factors beyond theta matter only to the kinds that name them in ROPE_KINDS."""

    kind: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


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
    attention_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def rotary_dim(self) -> int:
        """Leading channels of a head that rotate; the rest pass through."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @classmethod
    def from_dict(cls, raw: Json) -> ModelConfig:
        """Read a parsed config.json of transformers 4 or 5. Raises ConfigError."""
        model_type = _require(raw, "model_type", str)
        if model_type not in FAMILIES:
            raise ConfigError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[model_type]
        hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
        head_dim = _head_dim(raw, family, hidden, heads)
        bias = _optional(raw, "attention_bias", bool, False)
        config = cls(
            model_type=model_type,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_positive(raw, "num_key_value_heads", default=heads),
            head_dim=head_dim,
            rms_norm_eps=float(_optional(raw, "rms_norm_eps", float, 1e-6)),
            max_position_embeddings=_positive(raw, "max_position_embeddings", default=2048),
            tie_word_embeddings=_optional(raw, "tie_word_embeddings", bool, False),
            dtype=_agreed(raw, ("dtype", "torch_dtype"), "float32"),
            rope=_rope(raw),
            windows=_windows(raw, family),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            mlp_bias=_optional(raw, "mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            attention_scale=head_dim**-0.5,
            eos_token_ids=_token_ids(raw.get("eos_token_id"), "eos_token_id"),
            bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"), "bos_token_id")), None),
        )
        _check(config, raw)
        return config


def served_dtype(stored: str) -> str:
    """What "auto" makes of a checkpoint's dtype: float32 is served in bfloat16, half the memory and bandwidth."""
    return "bfloat16" if stored == "float32" else stored


def load_config(folder: Path) -> ModelConfig:
    """Read folder/config.json; end-of-sequence ids of generation_config.json, where present, join those of the model.

    Raises ConfigError, for a missing or broken file too.
    """
    raw = dict(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.exists():
        ids = _token_ids(raw.get("eos_token_id"), "eos_token_id")
        more = _token_ids(_read_json(generation).get("eos_token_id"), "eos_token_id")
        raw["eos_token_id"] = list(dict.fromkeys(ids + more))
    return ModelConfig.from_dict(raw)


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
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported; known: silu")


def _head_dim(raw: Json, family: Family, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return _positive(raw, "head_dim")
    if family.head_dim is not None:
        return family.head_dim
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not set"
        )
    return hidden // heads


def _windows(raw: Json, family: Family) -> tuple[int | None, ...]:
    layers = _positive(raw, "num_hidden_layers")
    window = raw.get("sliding_window", family.sliding_window)
    if window is None or (family.window_switch and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"sliding_window is {window!r}, expected a positive whole number or null")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _optional(raw, "max_window_layers", int, layers) if family.window_switch else 0
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise ConfigError(f"layer_types must name {layers} layers, each one of {', '.join(LAYER_TYPES)}; got {kinds}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: Json) -> RopeConfig:
    """One RopeConfig from rope_parameters (transformers 5), rope_scaling and top-level keys, which must agree."""
    places = [_rope_place(raw, "rope_parameters"), _rope_place(raw, "rope_scaling")]
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    places.append({key: raw[key] for key in keys if raw.get(key) is not None})
    merged: dict[str, Any] = {}
    for place in places:
        for key, value in place.items():
            if merged.setdefault(key, value) != value:
                raise ConfigError(
                    f"rotary settings disagree: {key} is {merged[key]!r} in one place and {value!r} in another"
                )
    kind = merged.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if missing := [key for key in ROPE_KINDS[kind] if key not in merged]:
        raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}")
    numbers = {key: _number(merged, key) for key in ROPE_KINDS[kind]}
    original = int(numbers.pop("original_max_position_embeddings", 0))
    return RopeConfig(
        kind=kind,
        theta=_number(merged, "rope_theta", 10000.0),
        partial_rotary_factor=_number(merged, "partial_rotary_factor", 1.0),
        original_max_position_embeddings=original,
        **numbers,
    )


def _rope_place(raw: Json, key: str) -> dict[str, Any]:
    place = raw.get(key) or {}
    if not isinstance(place, dict):
        raise ConfigError(f"{key} is {place!r}, expected an object")
    if nested := [name for name, value in place.items() if isinstance(value, dict)]:
        raise ConfigError(f"{key} differs by layer type ({', '.join(nested)}), which is not supported")
    place = {name: value for name, value in place.items() if value is not None}
    kinds = [place.pop(name) for name in ("rope_type", "type") if name in place]
    if len(set(kinds)) > 1:
        raise ConfigError(f"{key} names two kinds: {' and '.join(map(repr, kinds))}")
    if kinds:
        place["rope_type"] = kinds[0]
    elif place and key == "rope_scaling":
        raise ConfigError(f"rope_scaling {place} does not say its rope_type")
    return place


def _require(raw: Json, key: str, kind: type[T]) -> T:
    if raw.get(key) is None:
        raise ConfigError(f"config.json lacks {key}")
    return _typed(raw[key], key, kind)


def _optional(raw: Json, key: str, kind: type[T], default: T) -> T:
    return default if raw.get(key) is None else _typed(raw[key], key, kind)


def _typed(value: Any, key: str, kind: type[T]) -> T:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{key} is {value!r}, expected {kind.__name__}")
    return value  # type: ignore[return-value]


def _positive(raw: Json, key: str, default: int | None = None) -> int:
    value = _require(raw, key, int) if default is None else _optional(raw, key, int, default)
    if value < 1:
        raise ConfigError(f"{key} is {value}, expected at least 1")
    return value


def _number(raw: Json, key: str, default: float | None = None) -> float:
    value = float(_require(raw, key, float) if default is None else _optional(raw, key, float, default))
    if not 0 < value < float("inf"):
        raise ConfigError(f"{key} is {value}, expected a positive number")
    return value


def _agreed(raw: Json, keys: tuple[str, ...], default: str) -> str:
    values = [_typed(raw[key], key, str) for key in keys if raw.get(key) is not None]
    if len(set(values)) > 1:
        raise ConfigError(f"{' and '.join(keys)} disagree: {' and '.join(values)}")
    return values[0].removeprefix("torch.") if values else default


def _token_ids(value: Any, key: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_typed(token, key, int) for token in ids)
