"""litgpt's model_config.yaml to the keys of config.json. What no model that is served has is refused by its key.

Knows nothing of YAML or of tensors' bytes beyond comparing the head with the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConvertError
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry, SourceTensor

REQUIRED_VALUES: dict[str, Any] = {
    "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    "shared_attention_norm": False, "post_attention_norm": False, "post_mlp_norm": False, "scale_embeddings": False,
    "lm_head_bias": False, "n_expert": 0, "attention_logit_softcapping": None, "final_logit_softcapping": None,
    "attention_scores_scalar": None, "norm_1": True, "norm_2": True, "latent_attention": None,
    "rope_local_base_freq": None, "rope_interleave": False, "norm_qk_type": "default",
}  # fmt: skip
LITGPT_DEFAULTS = {
    "parallel_residual": True,
    "bias": True,
    "norm_class_name": "LayerNorm",
    "mlp_class_name": "GptNeoxMLP",
}
USED = {
    "n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "intermediate_size", "block_size", "norm_eps",
    "rope_base", "rotary_percentage", "rope_condense_ratio", "rope_adjustments", "attn_bias", "norm_qk",
    "sliding_window_size", "sliding_window_indices", "sliding_window_layer_placing", "sliding_window_layer_stride",
}  # fmt: skip
HARMLESS = {
    "name", "hf_config", "vocab_size", "padding_multiple", "padded_vocab_size", "gelu_approximate",
    "n_expert_per_token", "moe_intermediate_size", "rope_n_elem", "rope_indices",
}  # fmt: skip
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip


def litgpt_config(path: Path, params: Mapping[str, Any], table: Mapping[str, SourceTensor]) -> dict[str, ConfigEntry]:
    """config.json with origins. Raises ConvertError naming the key of `path` that is missing, wrong or unknown."""
    _refuse(path, params)
    layers, width, heads = (_whole(path, params, key) for key in ("n_layer", "n_embd", "n_head"))
    kv_heads = _whole(path, params, "n_query_groups", heads.value)
    head_dim = _whole(path, params, "head_size", width.value // heads.value)
    if heads.value % kv_heads.value:
        raise ConvertError(f"n_head {heads.value} does not divide by n_query_groups {kv_heads.value}", path)
    if "transformer.wte.weight" not in table:
        raise ConvertError("no tensor 'transformer.wte.weight'", path.with_name("lit_model.pth"))
    model_type = _model_type(path, params)
    config = {
        "architectures": ConfigEntry([CLASSES[model_type.value]], model_type.origin),
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": _whole(path, params, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": ConfigEntry(table["transformer.wte.weight"].shape[0], "rows of transformer.wte"),
        "max_position_embeddings": _whole(path, params, "block_size", 4096),
        "rms_norm_eps": ConfigEntry(_number(path, params, "norm_eps", 1e-5), "norm_eps"),
        "hidden_act": ConfigEntry("silu", "mlp_class_name"),
        "tie_word_embeddings": _tied(path, table),
        **_rope(path, params),
    }
    if model_type.value in ("mistral", "phi3"):
        config["sliding_window"] = ConfigEntry(params.get("sliding_window_size"), "sliding_window_size")
    if model_type.value in ("llama", "qwen3"):
        config["attention_bias"] = ConfigEntry(False, "bias")
    return config


def _refuse(path: Path, params: Mapping[str, Any]) -> None:
    """Unknown keys, and known ones that say what is not served. A missing key means litgpt's default."""
    if unknown := sorted(params.keys() - USED - HARMLESS - REQUIRED_VALUES.keys()):
        raise ConvertError(f"key {unknown[0]!r} = {str(params[unknown[0]])[:40]} is not understood", path)
    for key, wanted in REQUIRED_VALUES.items():
        value = params.get(key, LITGPT_DEFAULTS.get(key, wanted))
        if (value or None) != (wanted or None):
            raise ConvertError(f"{key} is {value!r}: only models with {wanted!r} are served", path)


def _model_type(path: Path, params: Mapping[str, Any]) -> ConfigEntry:
    """The family that has what this model has. Raises ConvertError where none has all of it."""
    wanted = {
        "qwen3": bool(params.get("norm_qk")),
        "qwen2": bool(params.get("attn_bias")),
        "phi3": _number(path, params, "rotary_percentage", 0.25) != 1.0,
        "mistral": params.get("sliding_window_size") is not None,
    }
    found = [kind for kind, has in wanted.items() if has]
    if len(found) > 1 and found != ["phi3", "mistral"]:
        raise ConvertError(
            f"has features of {' and of '.join(found)} together, which no model that is served has", path
        )
    placed = params.get("sliding_window_indices") or [1]
    if not isinstance(placed, list):
        raise ConvertError(f"sliding_window_indices is {placed!r}, expected a list", path)
    stride = params.get("sliding_window_layer_stride") or params.get("sliding_window_layer_placing")
    if wanted["mistral"] and (not all(placed) or stride not in (None, 1, "all")):
        raise ConvertError("sliding windows in some of the layers only are not supported", path)
    origin = {"qwen3": "norm_qk", "qwen2": "attn_bias", "phi3": "rotary_percentage", "mistral": "sliding_window_size"}
    return (
        ConfigEntry(found[0], origin[found[0]]) if found else ConfigEntry("llama", "none of the other families' keys")
    )


def _rope(path: Path, params: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    theta = ConfigEntry(_number(path, params, "rope_base", 10000), "rope_base")
    share = _number(path, params, "rotary_percentage", 0.25)
    partial = None if share == 1.0 else ConfigEntry(share, "rotary_percentage")
    adjustments, condense = params.get("rope_adjustments"), _number(path, params, "rope_condense_ratio", 1)
    if adjustments is None:
        scaling = None if condense == 1 else {"rope_type": "linear", "factor": condense}
        return rope_entries(theta, scaling, "rope_condense_ratio", partial)
    if not isinstance(adjustments, dict) or adjustments.keys() != LLAMA3 or condense != 1:
        raise ConvertError(f"rope_adjustments is {str(adjustments)[:80]}, which is not understood", path)
    scaling = {"rope_type": "llama3", **adjustments}
    scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    return rope_entries(theta, scaling, "rope_adjustments", partial)


def _tied(path: Path, table: Mapping[str, SourceTensor]) -> ConfigEntry:
    head, embedding = table.get("lm_head.weight"), table["transformer.wte.weight"]
    if head is None:
        return ConfigEntry(True, "lm_head.weight is absent")
    equal = head.shape == embedding.shape and np.array_equal(head.read(), embedding.read())
    return ConfigEntry(bool(equal), f"lm_head.weight {'equals' if equal else 'differs from'} transformer.wte.weight")


def _whole(path: Path, params: Mapping[str, Any], key: str, default: int | None = None) -> ConfigEntry:
    value = params.get(key)
    if value is None and default is not None:
        return ConfigEntry(default, f"default of litgpt ({key} is absent)")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConvertError(f"{key} is {value!r}, expected a positive whole number", path)
    return ConfigEntry(value, key)


def _number(path: Path, params: Mapping[str, Any], key: str, default: float) -> float:
    value = params.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConvertError(f"{key} is {value!r}, expected a positive number", path)
    return float(value)
