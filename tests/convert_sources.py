"""Tiny checkpoints in the formats that people bring, made from Hugging Face tensors by other code than the converter's.

Knows nothing of the converter: permutations are spelled as the exporters of those formats spell them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BYTE_TOKENS = 259


def adjacent_rows(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Split-half rows to adjacent rows, as llama.cpp's exporter does it: view as (heads, 2, D / 2), swap, flatten."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], arch: str = "llama", quant: str = "F32",
    extra: dict[str, Any] | None = None, more_tensors: dict[str, NDArray[Any]] | None = None,
) -> Path:  # fmt: skip
    """A GGUF of architecture `arch`; matrices whose rows divide into blocks are stored as `quant`."""
    writer = GGUFWriter(path, arch)
    _metadata(writer, config, extra or {})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        data = tensor.numpy()
        kind = name.split(".")[-2]
        if arch == "llama" and kind in heads:
            data = adjacent_rows(data, heads[kind])
        _add(writer, gguf_name(name), data, quant)
    for name, data in (more_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, data: NDArray[Any], quant: str) -> None:
    kind = GGMLQuantizationType[quant]
    if quant == "F32" or data.ndim == 1 or data.shape[-1] % 32:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, quants.quantize(data, kind), raw_dtype=kind)


def _metadata(writer: GGUFWriter, config: dict[str, Any], extra: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in extra.items():
        adders[type(value)](key, value)
