"""Rotary settings of config.json in the spellings of transformers 4 and 5: one RopeConfig, or a refusal by name.

Knows no tensors and no frequencies (rope.py computes them); imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from model.json_values import MOST, ConfigError, Json, number, numbers, optional, positive

ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Every rotary scaling we compute, with the settings it cannot do without."""

ALIASES = {"su": "longrope"}  # Phi-3 before transformers took it in
BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # may stand at the top level
UNDERSTOOD = {
    *(key for keys in ROPE_KINDS.values() for key in keys), *BESIDE, "rope_type", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. Settings beyond theta matter only to the kinds that have them.

    attention_factor multiplies cosines and sines; it is worked out where the config leaves it to a rule.
    """

    kind: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def reach(self, positions: int) -> int:
        """Tokens that the scaling stretches `positions` (max_position_embeddings) to, by its own account."""
        own = {"linear": positions, "dynamic": positions, "yarn": self.original_max_position_embeddings}
        return int(min(MOST, own[self.kind] * self.factor)) if self.kind in own else positions


def read_rope(raw: Json, positions: int) -> RopeConfig:
    """From rope_parameters (transformers 5), rope_scaling and top-level keys, which must agree. Raises ConfigError.

    positions: max_position_embeddings, over which longrope takes its factor where it names none.
    """
    keys = _merged(raw)
    kind = keys.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if missing := [key for key in ROPE_KINDS[kind] if key not in keys]:
        raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}")
    low, high = (number(keys, key) if kind == "llama3" else 1.0 for key in ("low_freq_factor", "high_freq_factor"))
    if kind == "llama3" and high <= low:
        raise ConfigError(f"high_freq_factor is {high}, expected more than low_freq_factor {low}")
    original = _original(keys) if "original_max_position_embeddings" in ROPE_KINDS[kind] else 0
    factor = number(keys, "factor", positions / original if kind == "longrope" else 1.0) if kind != "default" else 1.0
    return RopeConfig(
        kind, _theta(keys), number(keys, "partial_rotary_factor", 1.0), factor, low, high, original,
        attention_factor=_attention_factor(kind, keys, factor, original),
        beta_fast=number(keys, "beta_fast", 32.0),
        beta_slow=number(keys, "beta_slow", 1.0),
        truncate=optional(keys, "truncate", bool, True),
        short_factor=numbers(keys, "short_factor") if kind == "longrope" else (),
        long_factor=numbers(keys, "long_factor") if kind == "longrope" else (),
    )  # fmt: skip


def check_width(rope: RopeConfig, width: int) -> None:
    """Raise ConfigError where the settings do not fit a rotary width of that many channels."""
    for key, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.kind == "longrope" and len(factors) != width // 2:
            raise ConfigError(f"{key} holds {len(factors)} numbers, expected {width // 2}: one for each rotated pair")
    if rope.kind == "dynamic" and width < 4:
        raise ConfigError(f"rope_type 'dynamic' needs a rotary width of at least 4, this one is {width}")


def _theta(keys: Json) -> float:
    theta = number(keys, "rope_theta", 10000.0)
    if theta <= 1:
        raise ConfigError(f"rope_theta is {theta}, expected more than 1")
    return theta


def _original(keys: Json) -> int:
    original = positive(keys, "original_max_position_embeddings")
    if original < 2:
        raise ConfigError(f"original_max_position_embeddings is {original}, expected at least 2")
    return original


def _attention_factor(kind: str, keys: Json, factor: float, original: int) -> float:
    """As said, else by the rule of the paper that the kind comes from. A missing or zero mscale counts for nothing."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in keys:
        return number(keys, "attention_factor")
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    mscale, all_dim = optional(keys, "mscale", float, 0.0), optional(keys, "mscale_all_dim", float, 0.0)
    if mscale and all_dim:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    return yarn_attention_factor(factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What the YaRN paper multiplies cosines and sines by when it stretches the context by factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _merged(raw: Json) -> dict[str, Any]:
    """The settings of all places in one dictionary. Raises ConfigError where they differ or one is not understood."""
    places = [_place(raw, "rope_parameters"), _place(raw, "rope_scaling")]
    places.append({key: raw[key] for key in BESIDE if raw.get(key) is not None})
    merged: dict[str, Any] = {}
    for place in places:
        for key, value in place.items():
            if merged.setdefault(key, value) != value:
                raise ConfigError(
                    f"rotary settings disagree: {key} is {merged[key]!r} in one place and {value!r} in another"
                )
    if unknown := sorted(merged.keys() - UNDERSTOOD):
        raise ConfigError(f"rotary setting {unknown[0]!r} is not understood; known: {', '.join(sorted(UNDERSTOOD))}")
    return merged


def _place(raw: Json, key: str) -> dict[str, Any]:
    place = raw.get(key) or {}
    if not isinstance(place, dict):
        raise ConfigError(f"{key} is {place!r}, expected an object")
    if nested := [name for name, value in place.items() if isinstance(value, dict)]:
        raise ConfigError(f"{key} differs by layer type ({', '.join(nested)}), which is not supported")
    place = {name: value for name, value in place.items() if value is not None}
    kinds = [place.pop(name) for name in ("rope_type", "type") if name in place]
    if len({ALIASES.get(str(kind), str(kind)) for kind in kinds}) > 1:
        raise ConfigError(f"{key} names two kinds: {' and '.join(map(repr, kinds))}")
    if kinds:
        place["rope_type"] = ALIASES.get(str(kinds[0]), str(kinds[0]))
    elif place and key == "rope_scaling":
        raise ConfigError(f"rope_scaling {place} does not say its rope_type")
    return place
