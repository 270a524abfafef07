"""RoPE scaling of config.json as GGUF's keys and tensors say it, for the writer.

Knows nothing of the other metadata or of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Float32
from convert.errors import ConvertError
from convert.formats.gguf_rope import FREQS, LONG, SHORT, YARN_KEYS, llama3_ratios
from model.config import ModelConfig

KEPT = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", *YARN_KEYS.values(), "truncate"},
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"},
}
"""What of each scaling can be said; "mscale" can where "mscale_all_dim" goes with it."""


def rotary_width(config: Mapping[str, Any]) -> int:
    """Channels of a head that turn."""
    return int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1.0))


def rope_metadata(config: Mapping[str, Any], arch: str, path: Path) -> dict[str, float | int | str]:
    """Keys under arch.rope.scaling. Raises ConvertError for a scaling that GGUF cannot hold without loss."""
    scaling = config.get("rope_scaling")
    if scaling is None or scaling["rope_type"] == "llama3":
        return {}
    rope, prefix = ModelConfig.from_dict(config).rope, f"{arch}.rope.scaling."
    said = {key for key, value in scaling.items() if value is not None} - {"rope_type", "finetuned"}
    mscale = rope.kind == "yarn" and scaling.get("mscale") == 1.0 and bool(scaling.get("mscale_all_dim"))
    if said - KEPT.get(rope.kind, set()) - ({"mscale", "mscale_all_dim"} if mscale else set()) or not rope.truncate:
        raise ConvertError(f"GGUF cannot hold rope scaling {scaling} without loss", path)
    metadata: dict[str, float | int | str] = {prefix + "type": rope.kind}
    if rope.kind == "longrope":
        metadata[prefix + "original_context_length"] = rope.original_max_position_embeddings
        return metadata | {prefix + "attn_factor": rope.attention_factor}
    metadata[prefix + "factor"] = rope.factor
    if rope.kind == "yarn":
        metadata[prefix + "original_context_length"] = rope.original_max_position_embeddings
        metadata |= {prefix + key: float(scaling[name]) for key, name in YARN_KEYS.items() if scaling.get(name)}
        metadata |= {prefix + "yarn_log_multiplier": float(scaling["mscale_all_dim"])} if mscale else {}
    return metadata


def rope_tables(config: Mapping[str, Any]) -> dict[str, Float32]:
    """The tensors that hold what no key does, fp32 [n / 2] each."""
    rope = ModelConfig.from_dict(config).rope
    if rope.kind == "llama3":
        return {
            FREQS: llama3_ratios(
                rope.theta, rotary_width(config), rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                rope.original_max_position_embeddings,
            )
        }  # fmt: skip
    if rope.kind != "longrope":
        return {}
    return {LONG: np.asarray(rope.long_factor, np.float32), SHORT: np.asarray(rope.short_factor, np.float32)}
