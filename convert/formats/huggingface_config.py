"""What a Hugging Face config.json leaves out because transformers has a default, made explicit.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
QWEN3_HEAD_DIM = 128


def with_defaults(path: Path, raw: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    """Every key of `raw`, and the defaults that a conversion to another format needs. Raises ConvertError."""
    if missing := [key for key in REQUIRED if not isinstance(raw.get(key), int) or raw[key] < 1]:
        raise ConvertError(f"{missing[0]} is {raw.get(missing[0])!r}, expected a positive whole number", path)
    heads = raw["num_attention_heads"]
    defaults: dict[str, Any] = {
        "num_key_value_heads": heads,
        "head_dim": QWEN3_HEAD_DIM if raw.get("model_type") == "qwen3" else raw["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    config = {key: ConfigEntry(value, "config.json") for key, value in raw.items()}
    config |= {key: ConfigEntry(value, "default") for key, value in defaults.items() if raw.get(key) is None}
    return config | _rope(raw)


def _rope(raw: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    """Both spellings from whichever is there."""
    new = raw.get("rope_parameters")
    if isinstance(new, dict) and "rope_theta" in new:
        scaling = {key: value for key, value in new.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        return rope_entries(ConfigEntry(new["rope_theta"], "rope_parameters"), None if plain else scaling, "")
    theta = ConfigEntry(raw.get("rope_theta", 10000.0), "rope_theta" if "rope_theta" in raw else "default")
    old = raw.get("rope_scaling")
    if not isinstance(old, dict):
        return rope_entries(theta, None, "")
    scaling = {"rope_type": old.get("rope_type", old.get("type")), **{k: v for k, v in old.items() if k != "type"}}
    return rope_entries(theta, scaling, "rope_scaling")
