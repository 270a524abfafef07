"""Two readings of a model for the proof: the source as its own runtime would read it, and the converted folder.

The source's reading knows nothing of the converter: its own names, its own hyper-parameters, its own pairing, no
permutation. A mistake in the converter's tables therefore shows as a difference. Nothing here is imported by the
converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.dtypes import Float32, to_float32
from convert.errors import ConvertError
from convert.forward import Dimensions
from convert.fused_readings import INTERNLM2_ROLES, LITGPT_ROLES, Cuts, internlm2, litgpt, stacked
from convert.reading_rotation import Rotation, canonical_rotation, gguf_rotation, meta_rotation
from convert.reading_windows import Windows, canonical_windows, every_layer
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
GGUF_ADJACENT = {"llama", "internlm2"}  # by llama.cpp's own table of rope types


@dataclass(frozen=True)
class Part:
    """Some of the rows of a tensor that holds several matrices."""

    name: str
    take: Callable[[Float32], Float32]


Roles = Mapping[str, str | Part]


@dataclass(frozen=True)
class TensorReading:
    """Weights by role from a table of tensors; the pairing decides `rotate`."""

    table: Mapping[str, SourceTensor]
    roles: Roles
    dimensions: Dimensions
    adjacent: bool

    def weight(self, role: str, layer: int | None = None) -> Float32:
        place = self.roles[role]
        if role == "head" and place not in self.table:
            place = self.roles["embed"]
        tensor = self.table[(place.name if isinstance(place, Part) else place).format(layer)]
        whole = to_float32(tensor.read(), tensor.dtype)
        return place.take(whole) if isinstance(place, Part) else whole

    def optional(self, role: str, layer: int) -> Float32 | None:
        place = self.roles.get(role)
        name = place.name if isinstance(place, Part) else place
        return None if name is None or name.format(layer) not in self.table else self.weight(role, layer)

    def rotate(self, x: Float32, cos: Float32, sin: Float32) -> Float32:
        width = 2 * cos.shape[-1]
        turning, rest = x[..., :width], x[..., width:]
        if self.adjacent:
            complex_ = (turning[..., 0::2] + 1j * turning[..., 1::2]) * (cos + 1j * sin)
            turned = np.stack([complex_.real, complex_.imag], axis=-1).reshape(turning.shape).astype(np.float32)
        else:
            first, second = np.split(turning, 2, axis=-1)
            turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return np.concatenate([turned, rest], axis=-1)


def source_reading(source: Source) -> TensorReading:
    """The source as its own runtime reads it. Raises ConvertError for a format without an independent reading."""
    if source.format.startswith("huggingface"):
        return canonical_reading({**source.table, **source.derived}, {**source.values(), **source.raw})
    if source.format == "gguf":
        return _gguf_reading(source.table, source.raw)
    if source.format in ("meta", "mistral") or source.format.startswith("llama2c"):
        return _meta_reading(source.table, source.raw)
    if source.format == "internlm2":
        return _fused_reading(source, INTERNLM2_ROLES, *internlm2({**source.values(), **source.raw}))
    if source.format == "litgpt":
        return _fused_reading(source, LITGPT_ROLES, *litgpt(source.table, source.raw))
    raise ConvertError(f"no independent reading of {source.format}", source.path)


def _fused_reading(source: Source, roles: Mapping[str, str], dims: Dimensions, cuts: Cuts) -> TensorReading:
    parts: dict[str, Part] = {role: Part(name, take) for role, (name, take) in cuts.items()}
    return TensorReading(source.table, {**roles, **parts}, dims, adjacent=False)


def _gguf_reading(table: Mapping[str, SourceTensor], metadata: Mapping[str, Any]) -> TensorReading:
    arch = metadata["general.architecture"]

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        return value[0] if isinstance(value, tuple) else value

    heads = field("attention.head_count")
    kv_heads, width = (
        field("attention.head_count_kv", heads),
        field("attention.key_length", field("embedding_length") // heads),
    )
    dims = _dimensions(
        gguf_rotation(table, field, width), field("block_count"), heads, kv_heads, width,
        field("attention.layer_norm_rms_epsilon"), every_layer(field("attention.sliding_window"), field("block_count")),
    )  # fmt: skip
    roles: Roles = GGUF_ROLES
    if arch == "phi3":
        qkv, up = "blk.{}.attn_qkv.weight", "blk.{}.ffn_up.weight"
        roles = {**GGUF_ROLES, **_stacked(dims, qkv, up, field("feed_forward_length"))}
    return TensorReading(table, roles, dims, adjacent=arch in GGUF_ADJACENT)


def _meta_reading(table: Mapping[str, SourceTensor], params: Mapping[str, Any]) -> TensorReading:
    """Meta's own reading: consecutive channels are one complex number."""
    heads = params["n_heads"]
    width = table["layers.0.attention.wq.weight"].shape[0] // heads
    dims = _dimensions(
        meta_rotation(params, width), params["n_layers"], heads, params.get("n_kv_heads") or heads, width,
        params["norm_eps"], every_layer(params.get("sliding_window"), params["n_layers"]),
    )  # fmt: skip
    return TensorReading(table, META_ROLES, dims, adjacent=True)


def canonical_reading(table: Mapping[str, SourceTensor], config: Mapping[str, Any]) -> TensorReading:
    """A canonical folder: Hugging Face names, split-half pairs, hyper-parameters from config.json."""
    heads, kind = config["num_attention_heads"], config["model_type"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    dims = _dimensions(
        canonical_rotation(config, width), config["num_hidden_layers"], heads,
        config.get("num_key_value_heads") or heads, width, config["rms_norm_eps"],
        canonical_windows(config),
    )  # fmt: skip
    roles: Roles = HF_ROLES
    if kind == "phi3":
        qkv, up = "model.layers.{}.self_attn.qkv_proj.weight", "model.layers.{}.mlp.gate_up_proj.weight"
        roles = {**HF_ROLES, **_stacked(dims, qkv, up, config["intermediate_size"])}
    return TensorReading(table, roles, dims, adjacent=False)


def _dimensions(
    rotation: Rotation, layers: int, heads: int, kv_heads: int, width: int, eps: float, windows: Windows
) -> Dimensions:
    return Dimensions(layers, heads, kv_heads, width, eps, windows, rotation.near, rotation.scale, rotation.far)


def _stacked(dims: Dimensions, qkv: str, gate_up: str, inner: int) -> dict[str, Part]:
    """Roles of matrices that lie on top of each other: q, k, v in one tensor, gate and up in another."""
    parts = {role: Part(name, take) for role, (name, take) in stacked(dims, qkv).items()}
    parts["gate"] = Part(gate_up, lambda whole: whole[:inner])
    parts["up"] = Part(gate_up, lambda whole: whole[inner:])
    return parts
