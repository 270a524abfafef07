"""How fast each pair turns, as the runtime of each format computes it: for the readings that a proof compares.

Knows no tensors but GGUF's tables of factors, and shares nothing with the converter or with the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import to_float32
from convert.errors import ConvertError
from convert.source import SourceTensor

Frequencies = NDArray[np.float64]
Field = Callable[..., Any]


class Rotation(NamedTuple):
    """Inverse frequencies fp64 [n / 2], the factor on cos and sin, and the frequencies over the original context where
    those are others (longrope)."""

    near: Frequencies
    scale: float = 1.0
    far: Frequencies | None = None


def plain_frequencies(theta: float, width: int) -> Frequencies:
    """theta ** (-2i / n) for i < n / 2."""
    exponents: Frequencies = np.arange(0, width, 2, dtype=np.float64) / width
    return np.power(float(theta), -exponents)


def yarn(
    plain: Frequencies, theta: float, factor: float, original: int, fast: float, slow: float, truncate: bool = True
) -> Frequencies:
    """YaRN (arXiv 2309.00071): slow pairs interpolated, fast pairs kept, a ramp between."""
    width = 2 * len(plain)
    ends = [width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    blended: Frequencies = plain / factor * ramp + plain * (1 - ramp)
    return blended


def yarn_scale(factor: float, mscale: float = 1.0, over: float = 0.0) -> float:
    """The paper's factor on cos and sin, or the ratio of two where `over` is set."""

    def grown(by: float) -> float:
        return 1.0 + 0.1 * by * math.log(max(factor, 1.0))

    return grown(mscale) / grown(over) if over else grown(mscale)


def longrope_scale(positions: int, original: int) -> float:
    """LongRoPE's factor on cos and sin (arXiv 2402.13753)."""
    return math.sqrt(1 + math.log(positions / original) / math.log(original)) if positions > original else 1.0


def llama3(plain: Frequencies, factor: float, low: float, high: float, original: int) -> Frequencies:
    """Llama 3.1: by wavelength kept, divided, or between."""
    wavelength = 2 * np.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return np.where(slow, plain / factor, np.where(fast, plain, between))


def canonical_rotation(config: Mapping[str, Any], head_dim: int) -> Rotation:
    """config.json in either spelling."""
    old_style = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_scaling") or {})}
    rope: Mapping[str, Any] = config.get("rope_parameters") or old_style
    theta, kind = rope.get("rope_theta", 1e4), rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    plain, positions = plain_frequencies(theta, int(head_dim * share)), config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings", positions)
    if kind in ("default", "dynamic"):  # dynamic leaves sequences within max_position_embeddings alone
        return Rotation(plain)
    if kind == "linear":
        return Rotation(plain / rope["factor"])
    if kind == "llama3":
        return Rotation(llama3(plain, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original))
    said = rope.get("attention_factor")
    if kind == "yarn":
        ramp = rope["factor"], original, rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0)
        mscale, over = rope.get("mscale"), rope.get("mscale_all_dim")
        rule = yarn_scale(rope["factor"], mscale, over) if mscale and over else yarn_scale(rope["factor"])
        return Rotation(yarn(plain, theta, *ramp, rope.get("truncate", True)), said or rule)
    if kind not in ("longrope", "su"):
        raise ConvertError(f"rope_type {kind!r} cannot be verified")
    stretched = int(original * rope["factor"]) if rope.get("factor") else positions
    near, far = (plain / np.asarray(rope[f"{key}_factor"], np.float64) for key in ("short", "long"))
    return Rotation(near, said or longrope_scale(stretched, original), far)


def gguf_rotation(table: Mapping[str, SourceTensor], field: Field, head_dim: int) -> Rotation:
    """GGUF metadata as llama.cpp reads it. field(key, default) gives the architecture's own metadata."""
    theta, positions = field("rope.freq_base", 1e4), field("context_length")
    plain = plain_frequencies(theta, field("rope.dimension_count", head_dim))
    original, scale = field("rope.scaling.original_context_length", positions), field("rope.scaling.attn_factor", 1.0)

    def factors(name: str) -> Frequencies:
        return to_float32(table[name].read(), "F32").astype(np.float64)

    if "rope_factors_long.weight" in table:
        near, far = (plain / factors(f"rope_factors_{kind}.weight") for kind in ("short", "long"))
        return Rotation(near, scale, far)
    if "rope_freqs.weight" in table:
        return Rotation(plain / factors("rope_freqs.weight"), scale)
    factor, kind = field("rope.scaling.factor", field("rope.scale_linear", 1.0)), field("rope.scaling.type", "linear")
    if kind != "yarn":
        return Rotation(plain if kind == "none" else plain / factor, scale)
    ramp = factor, original, field("rope.scaling.yarn_beta_fast", 32.0), field("rope.scaling.yarn_beta_slow", 1.0)
    rule = yarn_scale(factor, 1.0, field("rope.scaling.yarn_log_multiplier", 0.0))
    return Rotation(yarn(plain, theta, *ramp), scale * field("rope.scaling.yarn_attn_factor", rule))


def meta_rotation(params: Mapping[str, Any], head_dim: int) -> Rotation:
    """params.json as Meta's and Mistral's code reads it."""
    theta = params.get("rope_theta", 1e4)
    plain = plain_frequencies(theta, head_dim)
    if params.get("use_scaled_rope"):
        factor = 32.0 if (params["dim"], params["n_layers"]) in ((2048, 16), (3072, 28)) else 8.0
        return Rotation(llama3(plain, factor, 1, 4, 8192))
    if (ramp := params.get("yarn")) is None:
        return Rotation(plain)
    original, fast, slow = ramp["original_max_position_embeddings"], ramp.get("beta", 32), ramp.get("alpha", 1)
    scale = yarn_scale(ramp["factor"]) if ramp.get("apply_scale", True) else 1.0
    return Rotation(yarn(plain, theta, ramp["factor"], original, fast, slow), scale)
