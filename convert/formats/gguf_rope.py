"""RoPE parameters of a GGUF file: base, scaling keys, and `rope_freqs.weight` inverted to Llama 3 scaling.

Knows nothing of the other metadata.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.dtypes import Float32
from convert.errors import ConvertError
from convert.formats.gguf import GgufFile
from convert.formats.gguf_fields import Fields
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry

DEFAULT_THETA = 10000.0
YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # any other yarn_* key is refused


def rope_config(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, ConfigEntry]:
    """The three RoPE entries of config.json."""
    theta = fields.get("rope.freq_base", float, DEFAULT_THETA)
    scaling, origin = _scaling_keys(fields), f"{fields.arch}.rope.scaling.*"
    freqs = file.tensors.get("rope_freqs.weight")
    if freqs is None:
        return rope_entries(theta, scaling, origin)
    if scaling is not None or freqs.type != "F32" or freqs.shape != (head_dim // 2,):
        text = f"rope_freqs.weight {freqs.type} {freqs.shape} does not fit the model"
        raise ConvertError(text, freqs.path, freqs.offset)
    ratios = freqs.blocks().reshape(-1).view(np.float32)
    inverted = invert_llama3(ratios, theta.value)
    if inverted is None:
        raise ConvertError("rope_freqs.weight is not a Llama 3 scaling: cannot be written", freqs.path, freqs.offset)
    return rope_entries(theta, inverted, "rope_freqs.weight")


def _scaling_keys(fields: Fields) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", str, "none").value
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail("rope.scaling.type", f"{kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.get("rope.scaling.factor", float).value}
    if kind == "linear":
        return scaling
    original = fields.get("rope.scaling.original_context_length").value
    scaling["original_max_position_embeddings"] = original
    for key, name in YARN_KEYS.items():
        if fields.has(f"rope.scaling.{key}"):
            scaling[name] = fields.get(f"rope.scaling.{key}", float).value
    return scaling


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
