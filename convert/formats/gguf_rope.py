"""RoPE parameters of a GGUF file: base, scaling keys, longrope's tables of factors, and `rope_freqs.weight` inverted to
Llama 3 scaling.

Knows nothing of the other metadata.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from convert.dtypes import Float32, shortest_float
from convert.errors import ConvertError
from convert.formats.gguf import GgufFile, GgufTensor
from convert.formats.gguf_fields import Fields
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry

DEFAULT_THETA = 10000.0
YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (FREQS, LONG, SHORT)
"""Tensors that say how positions are scaled: they go into the config."""


def rope_config(file: GgufFile, fields: Fields, head_dim: int, positions: int) -> dict[str, ConfigEntry]:
    """The RoPE entries of config.json. positions: context_length."""
    theta = fields.get("rope.freq_base", float, DEFAULT_THETA)
    width, partial = _width(fields, head_dim)
    fields.raw("rope.scaling.finetuned")  # says how the model came about, not how it runs
    scaling: dict[str, Any] | None
    if LONG in file.tensors or SHORT in file.tensors:
        scaling, origin = (
            _longrope(file, fields, width, positions),
            "rope_factors_long.weight, rope_factors_short.weight",
        )
    elif FREQS in file.tensors:
        scaling, origin = _llama3(file, fields, width, theta.value), FREQS
    else:
        scaling, origin = _scaling_keys(fields, positions), f"{fields.arch}.rope.scaling.*"
    entries = rope_entries(theta, scaling, origin, partial)
    if fields.has("rope.scaling.original_context_length"):
        entries["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length")
    return entries


def _width(fields: Fields, head_dim: int) -> tuple[int, ConfigEntry | None]:
    """Channels of a head that turn, and their share where it is not all of them."""
    width = fields.get("rope.dimension_count", int, head_dim)
    if width.value == head_dim:
        return head_dim, None
    if width.value > head_dim or width.value % 2:
        raise fields.fail("rope.dimension_count", f"{width.value} is odd or more than head_dim {head_dim}")
    share = width.value / head_dim
    share = share if int(head_dim * share) == width.value else math.nextafter(share, 1.0)
    return width.value, ConfigEntry(share, f"{width.origin} / head_dim")


def _scaling_keys(fields: Fields, positions: int) -> dict[str, Any] | None:
    """By the keys alone. llama.cpp takes a factor without a type as linear, under an older name too."""
    old = "rope.scale_linear"
    factor = fields.get("rope.scaling.factor" if not fields.has(old) else old, float, 1.0).value
    kind = fields.get("rope.scaling.type", str, "linear").value
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail("rope.scaling.type", f"{kind!r} is not supported without its tensors")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    return scaling if kind == "linear" else scaling | _yarn_keys(fields, factor, positions)


def _yarn_keys(fields: Fields, factor: float, positions: int) -> dict[str, Any]:
    original = fields.get("rope.scaling.original_context_length", int, positions).value
    keys: dict[str, Any] = {"original_max_position_embeddings": original}
    for key, name in YARN_KEYS.items():
        if fields.has(f"rope.scaling.{key}"):
            keys[name] = fields.get(f"rope.scaling.{key}", float).value
    if fields.has("rope.scaling.yarn_log_multiplier"):
        keys |= {"mscale": 1.0, "mscale_all_dim": fields.get("rope.scaling.yarn_log_multiplier", float).value}
    if fields.get("rope.scaling.yarn_ext_factor", float, 1.0).value != 1.0:
        raise fields.fail("rope.scaling.yarn_ext_factor", "only 1 is supported")
    if fields.has("rope.scaling.attn_factor"):
        more = fields.get("rope.scaling.attn_factor", float).value
        keys["attention_factor"] = more * keys.get("attention_factor", 1.0 + 0.1 * math.log(max(factor, 1.0)))
    return keys


def _longrope(file: GgufFile, fields: Fields, width: int, positions: int) -> dict[str, Any]:
    if fields.get("rope.scaling.type", str, "longrope").value != "longrope":
        raise fields.fail("rope.scaling.type", f"does not go with {LONG}")
    original = fields.get("rope.scaling.original_context_length").value
    scaling: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    for name, key in ((SHORT, "short_factor"), (LONG, "long_factor")):
        if name not in file.tensors:
            raise ConvertError(f"tensor {name} is missing, the other table of factors is there", file.path)
        scaling[key] = [shortest_float(float(value)) for value in _table(file.tensors[name], width)]
    if fields.has("rope.scaling.attn_factor"):
        said = fields.get("rope.scaling.attn_factor", float).value
        rule = math.sqrt(1 + math.log(max(positions / original, 1.0)) / math.log(original)) if original > 1 else 1.0
        scaling |= {} if math.isclose(said, rule, rel_tol=1e-6) else {"attention_factor": said}
    return scaling


def _llama3(file: GgufFile, fields: Fields, width: int, theta: float) -> dict[str, Any]:
    freqs = file.tensors[FREQS]
    ratios = _table(freqs, width)
    if _scaling_keys(fields, 1) is not None:
        raise ConvertError(
            f"{FREQS} stands beside rope.scaling keys: only one of them can be", freqs.path, freqs.offset
        )
    inverted = invert_llama3(ratios, theta)
    if inverted is None:
        raise ConvertError(f"{FREQS} is not a Llama 3 scaling: cannot be written", freqs.path, freqs.offset)
    return inverted


def _table(tensor: GgufTensor, width: int) -> Float32:
    if tensor.type != "F32" or tensor.shape != (width // 2,):
        text = f"{tensor.name} {tensor.type} {tensor.shape} does not fit the model: expected F32 ({width // 2},)"
        raise ConvertError(text, tensor.path, tensor.offset)
    return tensor.blocks().reshape(-1).view(np.float32)


def llama3_ratios(theta: float, width: int, factor: float, low: float, high: float, original: float) -> Float32:
    """Unscaled over scaled frequency of each pair, fp32 [width / 2]: what rope_freqs.weight holds."""
    frequency = theta ** (-np.arange(0, width, 2) / width)
    turns = original * frequency / (2 * np.pi)  # rotations within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def invert_llama3(ratios: Float32, theta: float) -> dict[str, Any] | None:
    """The Llama 3 scaling that gives these ratios, or None. low_freq_factor is 1 by convention (only ratios matter).

    Between the two plateaus s = (1/r - 1/factor) / (1 - 1/factor) is linear in turns: s = slope * turns + offset.
    """
    factor = float(ratios.max())
    inside = (ratios > 1 + 1e-5) & (ratios < factor * (1 - 1e-5))
    if factor <= 1 or inside.sum() < 2:
        return None
    width = 2 * len(ratios)
    wavelength = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    smooth = (1 / ratios.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / wavelength[inside], smooth[inside], 1)
    high = 1 - 1 / offset
    original = slope * (high - 1)
    scaling = {
        "rope_type": "llama3",
        "factor": _near(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": _near(high),
        "original_max_position_embeddings": round(original),
    }
    again = llama3_ratios(theta, width, scaling["factor"], 1.0, scaling["high_freq_factor"], round(original))
    return scaling if np.allclose(again, ratios, rtol=1e-4) else None


def _near(value: float) -> float:
    """A whole or half number when the value is one within the precision of fp32 data."""
    rounded = round(value * 2) / 2
    return rounded if abs(value - rounded) < 1e-3 else value
