"""Tiny checkpoints in the formats that people bring, made from Hugging Face tensors by other code than the converter's.

Knows nothing of the converter: permutations are spelled as the exporters of those formats spell them.
"""

from __future__ import annotations

import struct
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
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
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
        if arch in ("llama", "internlm2") and kind in heads:
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
    adders: dict[type, Any] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in extra.items():
        adders[type(value)](key, value)


META_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
META_GLOBALS = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def meta_tensors(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Meta's names and adjacent pairs for Hugging Face tensors."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in META_GLOBALS:
            out[f"{META_GLOBALS[stem]}.weight"] = tensor
            continue
        _, _, layer, rest = stem.split(".", 3)
        kind = rest.split(".")[-1]
        rows = torch.from_numpy(adjacent_rows(tensor.numpy(), heads[kind])) if kind in heads else tensor
        out[f"layers.{layer}.{META_NAMES[rest]}.weight"] = rows
    return out


def meta_params(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"], "vocab_size": -1,
        "norm_eps": config["rms_norm_eps"], "rope_theta": config["rope_theta"], "multiple_of": 4,
    }  # fmt: skip


def write_llama2c(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], version: int) -> Path:
    """Versions 0, 1 and 2 as karpathy's export.py lays them out; group size of version 2: 8."""
    named = {name: tensor.numpy() for name, tensor in meta_tensors(config, tensors).items()}
    tied = "output.weight" not in named
    numbers = [config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
               config["num_attention_heads"], config["num_key_value_heads"]]  # fmt: skip
    vocab = config["vocab_size"] * (-1 if version == 0 and not tied else 1)
    header = struct.pack("<7i", *numbers, vocab, config["max_position_embeddings"])
    if version:
        header = struct.pack("<Ii", 0x616B3432, version) + header + bytes([tied])
        header = (header + (struct.pack("<i", 8) if version == 2 else b"")).ljust(256, b"\0")
    norms, matrices = ["attention_norm", "ffn_norm"], ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    matrices += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    layers = range(config["num_hidden_layers"])

    def of_layers(names: list[str]) -> list[NDArray[Any]]:
        return [named[f"layers.{i}.{name}.weight"] for name in names for i in layers]

    angles = np.outer(
        np.arange(config["max_position_embeddings"]), 1e4 ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    )
    if version == 0:
        order = of_layers(["attention_norm", *matrices[:4], "ffn_norm", *matrices[4:]])
        arrays = [named["tok_embeddings.weight"], *order, named["norm.weight"], np.cos(angles), np.sin(angles)]
    else:
        plain = [*of_layers(norms), named["norm.weight"]]
        arrays = [*plain, named["tok_embeddings.weight"], *of_layers(matrices)]
    arrays += [] if tied else [named["output.weight"]]
    path.write_bytes(header + b"".join(_llama2c_bytes(array, version) for array in arrays))
    return path


def _llama2c_bytes(array: NDArray[Any], version: int) -> bytes:
    if version < 2 or array.ndim == 1:
        return bytes(array.astype("<f4").tobytes())
    groups = array.astype("<f4").reshape(-1, 8)
    scales = np.abs(groups).max(1) / 127
    values = np.round(groups / scales[:, None]).astype(np.int8)
    return bytes(values.tobytes()) + bytes(scales.astype("<f4").tobytes())


def write_llama2c_torch(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = "") -> Path:
    """What the training script saves: the model among the state of the training."""
    args = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "dropout": 0.0, "multiple_of": 32,
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"], "max_seq_len": config["max_position_embeddings"],
    }  # fmt: skip
    model = {prefix + name: tensor for name, tensor in meta_tensors(config, tensors).items()}
    model.setdefault(f"{prefix}output.weight", model[f"{prefix}tok_embeddings.weight"])
    state = {"model": model, "model_args": args, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}}
    torch.save(state | {"iter_num": 7, "best_val_loss": torch.tensor(1.5), "config": {"device": "cpu"}}, path)
    return path
