"""The RoPE keys of config.json in both spellings: transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5
reads `rope_parameters`, and each ignores the other without a word.

Knows nothing of where the values come from.
"""

from __future__ import annotations

from typing import Any

from convert.source import ConfigEntry


def rope_entries(
    theta: ConfigEntry, scaling: dict[str, Any] | None, origin: str, partial: ConfigEntry | None = None
) -> dict[str, ConfigEntry]:
    """rope_theta, rope_scaling and rope_parameters from one theta and one scaling (None: plain RoPE).

    partial: the share of a head's channels that turn, where it is not all of them.
    """
    both = f"{theta.origin}; {origin}" if scaling else theta.origin
    parameters = {"rope_theta": theta.value, **(scaling or {"rope_type": "default"})}
    share = {} if partial is None else {"partial_rotary_factor": partial.value}
    return {
        "rope_theta": theta,
        "rope_scaling": ConfigEntry(scaling, both),
        "rope_parameters": ConfigEntry(parameters | share, both),
        **({} if partial is None else {"partial_rotary_factor": partial}),
    }
