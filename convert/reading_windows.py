"""How many tokens each layer sees, as the runtime of each format has it: for the readings that a proof compares.

Knows no tensors, and shares nothing with the converter or with the server. A window that is longer than a proof's text
does not show in its logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Windows = tuple[int | None, ...]
"""For each layer the tokens that it sees, itself included; None for all of them."""


def every_layer(window: int | None, layers: int) -> Windows:
    """One window, or none (0 stands for none too), for all layers."""
    return (window or None,) * layers


def canonical_windows(config: Mapping[str, Any]) -> Windows:
    """config.json as transformers reads it; and layer_types of a mistral, which only vLLM and this server heed."""
    layers, kind = config["num_hidden_layers"], config["model_type"]
    window = config.get("sliding_window", None if kind == "phi3" else 4096)
    if kind == "llama" or (kind in ("qwen2", "qwen3") and not config.get("use_sliding_window")):
        window = None
    first = config.get("max_window_layers", 28) if kind in ("qwen2", "qwen3") else 0
    kinds = config.get("layer_types") or ["full" if i < first else "sliding_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
