"""A GGUF header's metadata as the keys of config.json that decide memory.

Knows nothing of tokenizers, RoPE scaling or tensor data: the converter reads those, and checks every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.errors import ConvertError
from convert.formats.gguf_header import TensorRow

MODEL_TYPES = {"internlm2": "llama", "llama": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3"}
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}


def config_from_gguf(metadata: Mapping[str, Any], rows: Sequence[TensorRow], dtype: str) -> dict[str, Any]:
    """config.json's keys for ModelConfig.from_dict. Raises ConvertError for what the converter would refuse too."""
    arch = metadata.get("general.architecture")
    if arch not in MODEL_TYPES:
        raise ConvertError(f"GGUF architecture {arch!r} is not supported (known: {', '.join(MODEL_TYPES)})")
    config = {key: _number(metadata, f"{arch}.{name}") for key, name in KEYS.items()}
    heads = config["num_attention_heads"]
    shapes = {row.name: row.shape for row in rows}
    if "token_embd.weight" not in shapes:
        raise ConvertError("tensor token_embd.weight is missing")
    window = metadata.get(f"{arch}.attention.sliding_window") or None  # 0 stands for none
    return config | {
        "model_type": "mistral" if window and arch == "llama" else MODEL_TYPES[str(arch)],
        "num_key_value_heads": _number(metadata, f"{arch}.attention.head_count_kv", heads),
        "head_dim": _number(metadata, f"{arch}.attention.key_length", config["hidden_size"] // heads),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "sliding_window": window,
        "dtype": dtype,
    }


def _number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """One positive number; an array of equal numbers (one a layer) counts as one."""
    value = metadata.get(key, default)
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ConvertError(f"metadata {key} is {str(value)[:60]!r}, expected one number from 1 up for all layers")
    return value
