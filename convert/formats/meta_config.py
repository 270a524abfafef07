"""params.json to the keys of config.json. Shapes of the tensors win where the file is silent or says -1.

Knows nothing of how tensors are stored. A key that is not understood is refused; Meta's own loader ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConvertError
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry, SourceTensor

USED = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta", "use_scaled_rope", "head_dim",
    "hidden_dim", "sliding_window", "max_seq_len", "tied_embeddings", "yarn",
}  # fmt: skip
HARMLESS = {"multiple_of", "ffn_dim_multiplier", "max_batch_size", "model_type", "model_parallel_size"}
LARGEST = 1e12  # of any number here: far above what a model has, far below what arithmetic cannot hold
LLAMA_32_DIMS = {2048: 16, 3072: 28}  # hidden size: layers of Llama 3.2 1B and 3B, whose scaling factor is 32


def meta_config(
    path: Path, params: Mapping[str, Any], table: Mapping[str, SourceTensor], model_type: str
) -> dict[str, ConfigEntry]:
    """config.json with origins. Raises ConvertError naming the key of `path` that is missing, wrong or unknown."""
    if unknown := sorted(params.keys() - USED - HARMLESS):
        raise ConvertError(f"key {unknown[0]!r} = {str(params[unknown[0]])[:40]} is not understood", path)
    dim, layers, heads = (_positive(path, params, key) for key in ("dim", "n_layers", "n_heads"))
    kv_heads = ConfigEntry(heads.value, "n_heads (n_kv_heads is absent)")
    if params.get("n_kv_heads") is not None:
        kv_heads = _positive(path, params, "n_kv_heads")
    # never from the shapes: with a shard missing, every shape would fit a model with smaller heads
    head_dim = ConfigEntry(dim.value // heads.value, "dim / n_heads")
    if params.get("head_dim") is not None:
        head_dim = _positive(path, params, "head_dim")
    class_name = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}[model_type]
    config = {
        "architectures": ConfigEntry([class_name], "format"),
        "model_type": ConfigEntry(model_type, "format"),
        "hidden_size": dim,
        "intermediate_size": ConfigEntry(_rows(path, table, "layers.0.feed_forward.w1.weight"), "rows of w1"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": ConfigEntry(_rows(path, table, "tok_embeddings.weight"), "rows of tok_embeddings"),
        "max_position_embeddings": _context(path, params),
        "rms_norm_eps": ConfigEntry(float(_number(path, params, "norm_eps")), "norm_eps"),
        "hidden_act": ConfigEntry("silu", "format"),
        **_rope(path, params, dim.value, layers.value),
        "tie_word_embeddings": _tied(path, params, table),
    }
    if model_type == "mistral":
        config["sliding_window"] = ConfigEntry(params.get("sliding_window"), "sliding_window (null where absent)")
    else:
        config |= {key: ConfigEntry(False, "format") for key in ("attention_bias", "mlp_bias")}
    _cross_check(path, params, config)
    return config


def _number(path: Path, params: Mapping[str, Any], key: str) -> float:
    value = params.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
        raise ConvertError(f"{key} is {value!r}, expected a positive number", path)
    return value


def _positive(path: Path, params: Mapping[str, Any], key: str) -> ConfigEntry:
    value = _number(path, params, key)
    if int(value) != value:
        raise ConvertError(f"{key} is {value!r}, expected a whole number", path)
    return ConfigEntry(int(value), key)


def _rows(path: Path, table: Mapping[str, SourceTensor], name: str) -> int:
    if name not in table or len(table[name].shape) != 2:
        raise ConvertError(f"no matrix {name!r} in this folder", path.parent)
    return table[name].shape[0]


def _context(path: Path, params: Mapping[str, Any]) -> ConfigEntry:
    """Not in most files: the length that the model family is known for."""
    if params.get("max_seq_len") is not None:
        return _positive(path, params, "max_seq_len")
    if params.get("use_scaled_rope"):
        return ConfigEntry(131072, "not in the file: Llama 3.1 and 3.2 (use_scaled_rope)")
    theta = _number(path, {"rope_theta": 10000.0, **params}, "rope_theta")
    if theta == 500000.0:
        return ConfigEntry(8192, "not in the file: Llama 3 (rope_theta 500000)")
    if theta > 10000.0:
        return ConfigEntry(16384, "not in the file: Code Llama (rope_theta above 10000)")
    if params.get("norm_eps") == 1e-6:
        return ConfigEntry(2048, "not in the file: Llama 1 (norm_eps 1e-06)")
    return ConfigEntry(4096, "not in the file: Llama 2")


def _rope(path: Path, params: Mapping[str, Any], dim: int, layers: int) -> dict[str, ConfigEntry]:
    theta = ConfigEntry(10000.0, "not in the file: Llama 1 and 2")
    if "rope_theta" in params:
        theta = ConfigEntry(float(_number(path, params, "rope_theta")), "rope_theta")
    if params.get("yarn") is not None:
        return rope_entries(theta, _yarn(path, params["yarn"]), "yarn")
    if not params.get("use_scaled_rope"):
        return rope_entries(theta, None, "")
    small = LLAMA_32_DIMS.get(dim) == layers
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0 if small else 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    known = "Llama 3.2, by its size" if small else "Llama 3.1"
    return rope_entries(theta, scaling, f"use_scaled_rope; the factor is not in the file: {known}")


def _yarn(path: Path, yarn: Any) -> dict[str, Any]:
    known = {"factor", "original_max_position_embeddings", "beta", "alpha", "apply_scale"}
    if not isinstance(yarn, dict) or not {"factor", "original_max_position_embeddings"} <= yarn.keys() <= known:
        raise ConvertError(f"yarn is {str(yarn)[:80]}, which is not understood", path)
    numbers = {"beta": 32, "alpha": 1} | yarn
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": float(_number(path, yarn, "factor"))}
    scaling["original_max_position_embeddings"] = _positive(path, yarn, "original_max_position_embeddings").value
    scaling |= {"beta_fast": float(_number(path, numbers, "beta"))}
    scaling |= {"beta_slow": float(_number(path, numbers, "alpha"))}
    return scaling if yarn.get("apply_scale", True) else scaling | {"attention_factor": 1.0}


def _tied(path: Path, params: Mapping[str, Any], table: Mapping[str, SourceTensor]) -> ConfigEntry:
    """Four cases of flag and tensor; a flag that the tensors contradict is an error."""
    head, embedding = table.get("output.weight"), table["tok_embeddings.weight"]
    said = params.get("tied_embeddings")
    if head is None:
        if said is False:
            raise ConvertError("tied_embeddings is false, but there is no output.weight", path)
        return ConfigEntry(True, "output.weight is absent")
    equal = head.shape == embedding.shape and head.dtype == embedding.dtype and _equal(head, embedding)
    if said and not equal:
        raise ConvertError("tied_embeddings is true, but output.weight differs from tok_embeddings.weight", path)
    return ConfigEntry(equal, f"output.weight {'equals' if equal else 'differs from'} tok_embeddings.weight")


def _equal(a: SourceTensor, b: SourceTensor) -> bool:
    return bool(np.array_equal(a.read(), b.read()))


def _cross_check(path: Path, params: Mapping[str, Any], config: Mapping[str, ConfigEntry]) -> None:
    """What the file says beside the shapes must agree with them."""
    pairs = (("vocab_size", "vocab_size"), ("hidden_dim", "intermediate_size"))
    for key, name in pairs:
        said, found = params.get(key), config[name].value
        if said is not None and said != -1 and said != found:
            raise ConvertError(f"{key} is {said}, the tensors say {found}", path)
