"""Writes GGUF version 3: metadata, tensor table, data, one tensor in memory at a time.

Knows nothing of other formats; tensors arrive with GGUF's names and the pairing of the architecture. Norms and biases
are written as fp32, which is exact and what llama.cpp wants.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from convert.dtypes import raw_bytes, to_float32
from convert.errors import ConvertError
from convert.formats.gguf_rope_write import rope_metadata, rope_tables, rotary_width
from convert.plan import Target
from convert.source import Source
from convert.tokenizer.gguf_write import tokenizer_metadata
from model.config import ModelConfig

ALIGNMENT = 32
TYPE_CODES = {"F32": 0, "F16": 1, "BF16": 30}
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
PARTIAL_ROTARY = ("phi3",)
"""Where llama.cpp's loader and its graph take rope.dimension_count for less than a head; elsewhere they stop."""
Value = bool | int | float | str | list[str] | list[int] | list[float]


def write_gguf(path: Path, source: Source, targets: Sequence[Target]) -> None:
    """Raises ConvertError for a rope scaling or a tokenizer that GGUF's metadata cannot say."""
    config: dict[str, Any] = source.values()
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    if arch not in PARTIAL_ROTARY and (width := rotary_width(config)) != config["head_dim"]:
        text = f"llama.cpp refuses a GGUF {arch} of which {width} of {config['head_dim']} channels of a head turn"
        raise ConvertError(f"{text} (partial_rotary_factor): --to hf keeps it", source.path)
    metadata = _model_metadata(source, arch, targets)
    metadata |= tokenizer_metadata(source.tokenizer_files(), config["vocab_size"], source.path)
    tables = rope_tables(config)
    rows = [(t.name, t.shape, "F32" if len(t.shape) == 1 else t.dtype) for t in targets]
    rows += [(name, table.shape, "F32") for name, table in tables.items()]
    with path.open("wb") as file:
        file.write(_header(metadata, rows))
        _pad(file)
        for target, (_, _, dtype) in zip(targets, rows, strict=False):
            array = target.read() if dtype == target.dtype else to_float32(target.read(), target.dtype)
            file.write(raw_bytes(array))
            _pad(file)
        for table in tables.values():
            file.write(raw_bytes(table))
            _pad(file)


def _model_metadata(source: Source, arch: str, targets: Sequence[Target]) -> dict[str, Value]:
    config: dict[str, Any] = source.values()
    metadata: dict[str, Value] = {
        "general.architecture": arch,
        "general.name": source.path.stem,
        "general.file_type": FILE_TYPES[max(targets, key=lambda target: target.nbytes).dtype],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        f"{arch}.rope.dimension_count": rotary_width(config),
        f"{arch}.vocab_size": config["vocab_size"],
    }
    return metadata | _window(source, arch) | rope_metadata(config, arch, source.path)


def _window(source: Source, arch: str) -> dict[str, Value]:
    windows = ModelConfig.from_dict(source.values()).windows
    if not any(windows):
        return {}
    mixed, first = len(set(windows)) > 1, windows[0]
    if first is None or mixed or arch not in ("llama", "phi3"):
        where = " in some of the layers only" if mixed else ""
        raise ConvertError(f"GGUF's {arch} has no key for sliding windows{where}: --to hf keeps them", source.path)
    return {f"{arch}.attention.sliding_window": first}


def _header(metadata: Mapping[str, Value], rows: Sequence[tuple[str, tuple[int, ...], str]]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(rows), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    at = 0
    for name, shape, dtype in rows:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        parts.append(_text(name) + dims + struct.pack("<IQ", TYPE_CODES[dtype], at))
        size = int(np.prod(shape, dtype=np.int64)) * (4 if dtype == "F32" else 2)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, list):
        kind, items = _array(value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<I", STRING) + _text(value)


def _array(values: list[str] | list[int] | list[float]) -> tuple[int, bytes]:
    first = values[0] if values else ""
    if isinstance(first, str):
        return STRING, b"".join(_text(str(text)) for text in values)
    if isinstance(first, float):
        return FLOAT32, np.asarray(values, "<f4").tobytes()
    return INT32, np.asarray(values, "<i4").tobytes()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
