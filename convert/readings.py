"""Two readings of a model for the proof: the source as its own runtime would read it, and the converted folder.

The source's reading knows nothing of the converter: its own names, its own hyper-parameters, its own pairing, no
permutation. A mistake in the converter's tables therefore shows as a difference. Nothing here is imported by the
converter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Float32, to_float32
from convert.errors import ConvertError
from convert.forward import Dimensions
from convert.source import Source, SourceTensor

GGUF_ROLES = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight", "mlp_norm": "blk.{}.ffn_norm.weight",
    "q": "blk.{}.attn_q.weight", "k": "blk.{}.attn_k.weight", "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight", "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight", "q_norm": "blk.{}.attn_q_norm.weight", "k_norm": "blk.{}.attn_k_norm.weight",
    "q_bias": "blk.{}.attn_q.bias", "k_bias": "blk.{}.attn_k.bias", "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias", "gate_bias": "blk.{}.ffn_gate.bias", "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
}  # fmt: skip
HF_ROLES = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    **{role: f"model.layers.{{}}.self_attn.{role}_proj.weight" for role in "qkvo"},
    **{f"{role}_bias": f"model.layers.{{}}.self_attn.{role}_proj.bias" for role in "qkvo"},
    **{f"{role}_norm": f"model.layers.{{}}.self_attn.{role}_norm.weight" for role in "qk"},
    **{role: f"model.layers.{{}}.mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    **{f"{role}_bias": f"model.layers.{{}}.mlp.{role}_proj.bias" for role in ("gate", "up", "down")},
}  # fmt: skip
META_ROLES = {
    "embed": "tok_embeddings.weight", "norm": "norm.weight", "head": "output.weight",
    "attn_norm": "layers.{}.attention_norm.weight", "mlp_norm": "layers.{}.ffn_norm.weight",
    **{role: f"layers.{{}}.attention.w{role}.weight" for role in "qkvo"},
    "gate": "layers.{}.feed_forward.w1.weight", "up": "layers.{}.feed_forward.w3.weight",
    "down": "layers.{}.feed_forward.w2.weight",
}  # fmt: skip
GGUF_ADJACENT = {"llama"}  # by llama.cpp's own table of rope types

Frequencies = NDArray[np.float64]


@dataclass(frozen=True)
class TensorReading:
    """Weights by role from a table of tensors; the pairing decides `rotate`."""

    table: Mapping[str, SourceTensor]
    roles: Mapping[str, str]
    dimensions: Dimensions
    adjacent: bool

    def weight(self, role: str, layer: int | None = None) -> Float32:
        name = self.roles[role].format(layer)
        if role == "head" and name not in self.table:
            name = self.roles["embed"]
        tensor = self.table[name]
        return to_float32(tensor.read(), tensor.dtype)

    def optional(self, role: str, layer: int) -> Float32 | None:
        name = self.roles.get(role)
        return None if name is None or name.format(layer) not in self.table else self.weight(role, layer)

    def rotate(self, x: Float32, cos: Float32, sin: Float32) -> Float32:
        if self.adjacent:
            turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape).astype(np.float32)
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def plain_frequencies(theta: float, width: int) -> Frequencies:
    """theta ** (-2i / n) for i < n / 2."""
    exponents: Frequencies = np.arange(0, width, 2, dtype=np.float64) / width
    return np.power(float(theta), -exponents)


def source_reading(source: Source) -> TensorReading:
    """The source as its own runtime reads it. Raises ConvertError for a format without an independent reading."""
    if source.format in ("huggingface", "huggingface-bin"):
        return canonical_reading(source.table, source.raw)
    if source.format == "gguf":
        return _gguf_reading(source.table, source.raw)
    if source.format in ("meta", "mistral") or source.format.startswith("llama2c"):
        return _meta_reading(source.table, source.raw)
    raise ConvertError(f"no independent reading of {source.format}", source.path)


def _gguf_reading(table: Mapping[str, SourceTensor], metadata: Mapping[str, Any]) -> TensorReading:
    arch = metadata["general.architecture"]

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        return value[0] if isinstance(value, tuple) else value

    heads = field("attention.head_count")
    width = field("attention.key_length", field("embedding_length") // heads)
    frequencies = plain_frequencies(field("rope.freq_base", 1e4), width)
    scale = 1.0
    if "rope_freqs.weight" in table:
        frequencies = frequencies / to_float32(table["rope_freqs.weight"].read(), "F32")
    kind = field("rope.scaling.type", "none")
    if kind == "linear":
        frequencies = frequencies / field("rope.scaling.factor")
    if kind == "yarn":
        frequencies, scale = yarn(
            frequencies, field("rope.freq_base", 1e4), field("rope.scaling.factor"),
            field("rope.scaling.original_context_length"), field("rope.scaling.yarn_beta_fast", 32.0),
            field("rope.scaling.yarn_beta_slow", 1.0), None,
        )  # fmt: skip
    dims = Dimensions(
        field("block_count"), heads, field("attention.head_count_kv", heads), width,
        field("attention.layer_norm_rms_epsilon"), field("attention.sliding_window"), frequencies, scale,
    )  # fmt: skip
    return TensorReading(table, GGUF_ROLES, dims, adjacent=arch in GGUF_ADJACENT)


def _meta_reading(table: Mapping[str, SourceTensor], params: Mapping[str, Any]) -> TensorReading:
    """Meta's own reading: consecutive channels are one complex number."""
    heads = params["n_heads"]
    width = table["layers.0.attention.wq.weight"].shape[0] // heads
    theta, scale = params.get("rope_theta", 1e4), 1.0
    frequencies = plain_frequencies(theta, width)
    if params.get("use_scaled_rope"):
        factor = 32.0 if (params["dim"], params["n_layers"]) in ((2048, 16), (3072, 28)) else 8.0
        turns = 8192 * frequencies / (2 * np.pi)
        smooth = np.clip((turns - 1) / 3, 0, 1)
        frequencies = frequencies * ((1 - smooth) / factor + smooth)
    if (ramp := params.get("yarn")) is not None:
        attention = None if ramp.get("apply_scale", True) else 1.0
        original, fast, slow = ramp["original_max_position_embeddings"], ramp.get("beta", 32), ramp.get("alpha", 1)
        frequencies, scale = yarn(frequencies, theta, ramp["factor"], original, fast, slow, attention)
    dims = Dimensions(
        params["n_layers"], heads, params.get("n_kv_heads") or heads, width, params["norm_eps"],
        params.get("sliding_window"), frequencies, scale,
    )  # fmt: skip
    return TensorReading(table, META_ROLES, dims, adjacent=True)


def canonical_reading(table: Mapping[str, SourceTensor], config: Mapping[str, Any]) -> TensorReading:
    """A canonical folder: Hugging Face names, split-half pairs, hyper-parameters from config.json."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    old_style = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_scaling") or {})}
    rope = config.get("rope_parameters") or old_style
    frequencies, scale = canonical_frequencies(rope, width, config["max_position_embeddings"])
    dims = Dimensions(
        config["num_hidden_layers"], heads, config.get("num_key_value_heads", heads), width, config["rms_norm_eps"],
        config.get("sliding_window") if config["model_type"] == "mistral" else None, frequencies, scale,
    )  # fmt: skip
    return TensorReading(table, HF_ROLES, dims, adjacent=False)


def canonical_frequencies(rope: Mapping[str, Any], width: int, context: int) -> tuple[Frequencies, float]:
    """Inverse frequencies and the factor on cos and sin for rope_parameters of config.json."""
    theta, kind = rope["rope_theta"], rope.get("rope_type", rope.get("type", "default"))
    plain = plain_frequencies(theta, width)
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    original = rope.get("original_max_position_embeddings", context)
    if kind == "yarn":
        attention = rope.get("attention_factor")
        return yarn(plain, theta, factor, original, rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0), attention)
    if kind != "llama3":
        raise ConvertError(f"rope_type {kind!r} cannot be verified")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * np.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return np.where(slow, plain / factor, np.where(fast, plain, between)), 1.0


def yarn(
    plain: Frequencies, theta: float, factor: float, original: int, fast: float, slow: float, attention: float | None
) -> tuple[Frequencies, float]:
    """YaRN (arXiv 2309.00071): slow pairs interpolated, fast pairs kept, a ramp between; cos and sin scaled."""
    width = 2 * len(plain)

    def correction(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), attention or 0.1 * math.log(factor) + 1.0
