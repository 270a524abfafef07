"""A GGUF header's metadata as the keys of config.json that decide memory.

Knows nothing of tokenizers, RoPE scaling or tensor data: the converter reads those, and checks every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.errors import ConvertError
from convert.formats.gguf_architectures import ARCHITECTURES, EMBEDDING, HEAD, QUERY_BIAS, SIZES, WINDOWED_LLAMA
from convert.formats.gguf_header import TensorRow


def config_from_gguf(metadata: Mapping[str, Any], rows: Sequence[TensorRow], dtype: str) -> dict[str, Any]:
    """config.json's keys for ModelConfig.from_dict. Raises ConvertError for what the converter would refuse too."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConvertError(f"GGUF architecture {arch!r} is not supported (known: {', '.join(ARCHITECTURES)})")
    config = {key: _number(metadata, f"{arch}.{name}") for key, name in SIZES.items()}
    heads = config["num_attention_heads"]
    shapes = {row.name: row.shape for row in rows}
    if EMBEDDING not in shapes:
        raise ConvertError(f"tensor {EMBEDDING} is missing")
    window = metadata.get(f"{arch}.attention.sliding_window") or None  # 0 stands for none
    return config | {
        "model_type": (WINDOWED_LLAMA if window and arch == "llama" else ARCHITECTURES[str(arch)]).model_type,
        "num_key_value_heads": _number(metadata, f"{arch}.attention.head_count_kv", heads),
        "head_dim": _number(metadata, f"{arch}.attention.key_length", config["hidden_size"] // heads),
        "vocab_size": shapes[EMBEDDING][0],
        "tie_word_embeddings": HEAD not in shapes,
        "attention_bias": QUERY_BIAS in shapes,
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
