"""Writes llama2.c version 0: what its own run.c reads.

Knows nothing of other formats; tensors arrive with Meta's names and adjacent pairs. RoPE tables are recomputed in fp32,
or taken from the source where it carries them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Array, raw_bytes, to_float32
from convert.errors import ConvertError
from convert.formats.llama2c import EPS, THETA, Header
from convert.plan import Target
from convert.source import Source
from model.config import ModelConfig


def write_llama2c(path: Path, source: Source, targets: Sequence[Target]) -> None:
    """Raises ConvertError when what the format fixes (base 1e4, epsilon 1e-5, no biases) is not what the model has."""
    header = _header(source)
    by_name = {target.name: target for target in targets}
    _check(source, header, targets)
    numbers = (header.dim, header.hidden_dim, header.layers, header.heads, header.kv_heads)
    vocabulary = header.vocab_size if header.tied else -header.vocab_size
    with path.open("wb") as file:
        file.write(struct.pack("<7i", *numbers, vocabulary, header.seq_len))
        for name, _ in header.order():
            if name in by_name:
                target = by_name[name]
                file.write(raw_bytes(to_float32(target.read(), target.dtype)))
            else:
                file.write(raw_bytes(_table(source, header, name)))


def _header(source: Source) -> Header:
    config: dict[str, Any] = source.values()
    return Header(
        0, 28, config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
        config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"],
        config["max_position_embeddings"], config["tie_word_embeddings"],
    )  # fmt: skip


def _check(source: Source, header: Header, targets: Sequence[Target]) -> None:
    config: dict[str, Any] = source.values()
    rope = config["rope_parameters"]
    windows, share = ModelConfig.from_dict(config).windows, rope.get("partial_rotary_factor", 1.0)
    fits = {
        f"RoPE base {THETA:g}": (rope["rope_theta"], rope["rope_theta"] == THETA),
        "no RoPE scaling": (config.get("rope_scaling"), config.get("rope_scaling") is None),
        "whole heads that turn": (share, share == 1.0),
        f"norm epsilon {EPS:g}": (config["rms_norm_eps"], math.isclose(config["rms_norm_eps"], EPS, rel_tol=1e-6)),
        "head_dim = dim / heads": (config["head_dim"], config["head_dim"] == header.head_dim),
        "no sliding window": (windows, not any(windows)),
        "model type llama or mistral": (config["model_type"], config["model_type"] in ("llama", "mistral")),
    }
    if broken := [f"{what}, this model has {value}" for what, (value, holds) in fits.items() if not holds]:
        raise ConvertError(f"llama2.c implies {broken[0]}: --to hf and --to gguf hold it", source.path)
    expected = {name for name, _ in header.order()} - {"freqs_cos", "freqs_sin"}
    assert expected == {target.name for target in targets}


def _table(source: Source, header: Header, name: str) -> Array:
    """freqs_cos or freqs_sin, fp32 [seq_len, head_dim / 2]."""
    if name in source.table:
        return source.table[name].read()
    exponents = np.arange(0, header.head_dim, 2).astype(np.float32) / np.float32(header.head_dim)
    frequencies = np.float32(1.0) / np.float32(THETA) ** exponents
    angles = np.outer(np.arange(header.seq_len, dtype=np.float32), frequencies)
    return np.asarray(np.cos(angles) if name == "freqs_cos" else np.sin(angles), np.float32)
