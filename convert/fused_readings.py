"""Readings of formats that keep q, k and v in one tensor, for the proof: each takes its rows as its own runtime does.

Knows nothing of the converter's row maps. Nothing here is imported by the converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convert.dtypes import Float32
from convert.forward import Dimensions
from convert.reading_rotation import Rotation, canonical_rotation, llama3, plain_frequencies
from convert.reading_windows import every_layer
from convert.source import SourceTensor

Take = Callable[[Float32], Float32]
Cuts = dict[str, tuple[str, Take]]
"""Role -> tensor (with {} for the layer) and what to take of it."""

INTERNLM2_ROLES = {
    "embed": "model.tok_embeddings.weight", "norm": "model.norm.weight", "head": "output.weight",
    "attn_norm": "model.layers.{}.attention_norm.weight", "mlp_norm": "model.layers.{}.ffn_norm.weight",
    "o": "model.layers.{}.attention.wo.weight", "o_bias": "model.layers.{}.attention.wo.bias",
    "gate": "model.layers.{}.feed_forward.w1.weight", "up": "model.layers.{}.feed_forward.w3.weight",
    "down": "model.layers.{}.feed_forward.w2.weight",
}  # fmt: skip
LITGPT_ROLES = {
    "embed": "transformer.wte.weight", "norm": "transformer.ln_f.weight", "head": "lm_head.weight",
    "attn_norm": "transformer.h.{}.norm_1.weight", "mlp_norm": "transformer.h.{}.norm_2.weight",
    "o": "transformer.h.{}.attn.proj.weight", "gate": "transformer.h.{}.mlp.fc_1.weight",
    "up": "transformer.h.{}.mlp.fc_2.weight", "down": "transformer.h.{}.mlp.proj.weight",
    "q_norm": "transformer.h.{}.attn.norm_q.weight", "k_norm": "transformer.h.{}.attn.norm_k.weight",
}  # fmt: skip


def stacked(dims: Dimensions, name: str) -> dict[str, tuple[str, Take]]:
    """q over k over v."""
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim

    def rows(start: int, count: int) -> Take:
        return lambda whole: whole[start : start + count]

    return {"q": (name, rows(0, q)), "k": (name, rows(q, kv)), "v": (name, rows(q + kv, kv))}


def grouped(dims: Dimensions, name: str) -> dict[str, tuple[str, Take]]:
    """Of every group of query heads: these, then their key head, then their value head."""
    share = dims.heads // dims.kv_heads

    def heads(which: slice) -> Take:
        def take(whole: Float32) -> Float32:
            by_group = whole.reshape(dims.kv_heads, share + 2, dims.head_dim, *whole.shape[1:])
            return by_group[:, which].reshape(-1, *whole.shape[1:])

        return take

    return {
        "q": (name, heads(slice(0, share))),
        "k": (name, heads(slice(share, share + 1))),
        "v": (name, heads(slice(share + 1, None))),
    }


def with_biases(cuts: Cuts) -> Cuts:
    """The same rows of the biases."""
    return cuts | {f"{role}_bias": (name.replace(".weight", ".bias"), take) for role, (name, take) in cuts.items()}


def internlm2(config: Mapping[str, Any]) -> tuple[Dimensions, Cuts]:
    """What config.json says, with InternLM2's own way of keeping q, k and v."""
    heads = config["num_attention_heads"]
    width = config["hidden_size"] // heads
    layers, rotation = config["num_hidden_layers"], canonical_rotation(config, width)
    dims = Dimensions(
        layers, heads, config.get("num_key_value_heads") or heads, width, config["rms_norm_eps"],
        every_layer(None, layers), rotation.near, rotation.scale, rotation.far,
    )  # fmt: skip
    return dims, with_biases(grouped(dims, "model.layers.{}.attention.wqkv.weight"))


def litgpt(table: Mapping[str, SourceTensor], params: Mapping[str, Any]) -> tuple[Dimensions, Cuts]:
    """What model_config.yaml says; the name of the fused tensor tells its layout."""
    heads = params["n_head"]
    width = params.get("head_size") or params["n_embd"] // heads
    rotation = _litgpt_rotation(params, width)
    dims = Dimensions(
        params["n_layer"], heads, params.get("n_query_groups") or heads, width, params.get("norm_eps", 1e-5),
        every_layer(params.get("sliding_window_size"), params["n_layer"]), rotation.near, rotation.scale,
    )  # fmt: skip
    old = "transformer.h.0.attn.attn.weight" in table
    take = (
        grouped(dims, "transformer.h.{}.attn.attn.weight") if old else stacked(dims, "transformer.h.{}.attn.qkv.weight")
    )
    return dims, with_biases(take)


def _litgpt_rotation(params: Mapping[str, Any], width: int) -> Rotation:
    turning = int(params.get("rotary_percentage", 0.25) * width)
    plain = plain_frequencies(params.get("rope_base", 10000), turning) / params.get("rope_condense_ratio", 1)
    if (more := params.get("rope_adjustments")) is None:
        return Rotation(plain)
    low, high = more["low_freq_factor"], more["high_freq_factor"]
    return Rotation(llama3(plain, more["factor"], low, high, more["original_max_seq_len"]))
