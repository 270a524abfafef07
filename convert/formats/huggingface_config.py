"""What a Hugging Face config.json leaves out because transformers has a default, made explicit.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.formats.rope_entries import rope_entries
from convert.served_model import served_model
from convert.source import ConfigEntry
from model.config import FAMILIES


def with_defaults(path: Path, raw: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    """Every key of `raw`, and the defaults that a conversion to another format needs. Raises ConvertError."""
    served_model(raw, path)
    heads = raw["num_attention_heads"]
    family = FAMILIES[raw["model_type"]]
    defaults: dict[str, Any] = {
        "num_key_value_heads": heads,
        "head_dim": family.head_dim or raw["hidden_size"] // heads,
        "max_position_embeddings": family.positions,
        "rms_norm_eps": family.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    if family.original_positions is not None:
        defaults["original_max_position_embeddings"] = family.original_positions
    config = {key: ConfigEntry(value, "config.json") for key, value in raw.items()}
    config |= {key: ConfigEntry(value, "default") for key, value in defaults.items() if raw.get(key) is None}
    return config | _rope(raw)


def _rope(raw: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    """Both spellings from whichever is there."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    place, origin = (new, "rope_parameters") if isinstance(new, dict) and new else (old, "rope_scaling")
    keys: dict[str, Any] = dict(place) if isinstance(place, dict) else {}
    beside = {key: keys.pop(key, raw.get(key)) for key in ("rope_theta", "partial_rotary_factor")}
    theta = ConfigEntry(10000.0, "default")
    if beside["rope_theta"] is not None:
        theta = ConfigEntry(beside["rope_theta"], origin)
    share = beside["partial_rotary_factor"]
    kind, twin = keys.pop("rope_type", None), keys.pop("type", None)
    scaling = None if (kind or twin or "default") == "default" else {"rope_type": kind or twin, **keys}
    return rope_entries(theta, scaling, origin, None if share is None else ConfigEntry(share, origin))
