"""Writes Mistral's own folder: params.json and one consolidated.safetensors, under Meta's names with adjacent pairs.

Knows nothing of other formats. Unlike Meta's, these params.json say head_dim, MLP width, windows, context and YaRN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.plan import Target
from convert.source import Source
from convert.write import write_safetensors
from model.config import ModelConfig, RopeConfig
from model.rope_config import yarn_attention_factor

KEPT = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "head_dim": "head_dim", "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "rms_norm_eps": "norm_eps",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_seq_len", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip


def write_mistral(folder: Path, source: Source, targets: Sequence[Target]) -> None:
    """Raises ConvertError for what params.json cannot say: another rope scaling than YaRN, windows in some layers."""
    params = _params(source)
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params) + "\n", "utf-8")
    write_safetensors(folder / "consolidated.safetensors", targets, lambda target, digest: None)


def _params(source: Source) -> dict[str, Any]:
    config: Mapping[str, Any] = source.values()
    model = ModelConfig.from_dict(config)
    params = {name: config[key] for key, name in KEPT.items()} | {"rope_theta": model.rope.theta}
    if len(set(model.windows)) > 1:
        raise ConvertError("params.json cannot hold windows in some of the layers only", source.path)
    if model.windows[0] is not None:
        params["sliding_window"] = model.windows[0]
    if model.rope.kind == "default" and model.rope.partial_rotary_factor == 1.0:
        return params
    yarn = _yarn(model.rope)
    if yarn is None:
        raise ConvertError(f"params.json cannot hold these rotary settings: {model.rope}", source.path)
    return params | {"yarn": yarn}


def _yarn(rope: RopeConfig) -> dict[str, Any] | None:
    """Whole heads, rounded ends of the ramp, and on cos and sin the paper's factor or none: else it cannot be said."""
    by_rule = rope.attention_factor == yarn_attention_factor(rope.factor)
    said = by_rule or rope.attention_factor == 1.0
    if rope.kind != "yarn" or rope.partial_rotary_factor != 1.0 or not rope.truncate or not said:
        return None
    return {
        "factor": rope.factor, "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta": rope.beta_fast, "alpha": rope.beta_slow, "apply_scale": by_rule,
    }  # fmt: skip
