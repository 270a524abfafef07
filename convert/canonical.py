"""Whether a Hugging Face folder is served as it is, by its config alone.

Knows nothing of tensors, and loads nothing heavy: the HTTP process asks before it starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.json_file import read_json
from model.safetensors_header import INDEX

SINGLE = "model.safetensors"
INTERNLM2 = "internlm2"
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where quantisers wrote what later went into config.json, and which of them each is."""


def is_huggingface(folder: Path) -> bool:
    """config.json and model.safetensors, or an index of shards."""
    there = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return there and (folder / "config.json").is_file()


def is_canonical(folder: Path) -> bool:
    """Whether such a folder is served as it is: names and layout are ours, and the weights are plain numbers."""
    return is_huggingface(folder) and not needs_conversion(folder)


def needs_conversion(folder: Path) -> bool:
    """Whether its config.json says that the weights are quantised, or laid out as we do not serve them."""
    config = read_json(folder / "config.json")
    return config.get("model_type") == INTERNLM2 or quantisation(folder, config) is not None


def quantisation(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the weights are quantised: what the file says, with `quant_method` named; None if they are not."""
    said = config.get("quantization_config") or config.get("compression_config")
    if isinstance(said, dict) and said.get("quant_method"):
        return dict(said)
    if isinstance(said, dict) and "compression_config" in config:
        return {**said, "quant_method": "compressed-tensors"}
    if isinstance(mlx := config.get("quantization"), dict):
        return {**mlx, "quant_method": "mlx"}
    if said:
        return {"quant_method": str(said)[:40]}
    for name, method in SIDE_FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None
