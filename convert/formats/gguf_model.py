"""From GGUF's metadata and tensor names to a `Source`: which architecture, which config, which Hugging Face names.

Knows nothing of the container's bytes (gguf.py), of tokenizers (tokenizer/gguf.py) or of which architectures there are
(gguf_architectures.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from convert.dtypes import NUMPY, Array
from convert.errors import ConvertError
from convert.formats.gguf import GgufFile, GgufTensor, read_gguf
from convert.formats.gguf_architectures import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    QUERY_BIAS,
    SIZES,
    WINDOWED_LLAMA,
    Architecture,
)  # fmt: skip
from convert.formats.gguf_fields import Fields
from convert.formats.gguf_quants import PLAIN, dequantize
from convert.formats.gguf_rope import TABLES, rope_config
from convert.source import ConfigEntry, Extent, Source, SourceTensor
from convert.tokenizer.gguf import token_id, tokenizer_files

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
STACKED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
DESCRIPTIVE = ("general.", "quantize.", "tokenizer.", "split.")  # they describe the file, or went into the tokenizer


def open_gguf(path: Path) -> Source:
    """Read the header of a GGUF model; tensors stay on disk. Raises ConvertError for what is not understood."""
    file = read_gguf(path)
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ConvertError("metadata general.architecture is missing", path)
    if arch not in ARCHITECTURES:
        raise ConvertError(f"GGUF architecture {arch!r} is not supported (known: {', '.join(ARCHITECTURES)})", path)
    fields = Fields(file, arch)
    config = _config(file, fields, ARCHITECTURES[arch])
    layer_names = LAYER_NAMES | (STACKED_NAMES if ARCHITECTURES[arch].stacked else {})
    names = {name: target for name in file.tensors if (target := _target_name(name, layer_names)) is not None}
    dropped = {name: "folded into rope_parameters" for name in TABLES if name in file.tensors}
    return Source(
        path=path, format="gguf", architecture=arch, pairing=ARCHITECTURES[arch].pairing, config=config,
        names=names, table={t.name: _source_tensor(t) for t in file.tensors.values()}, raw=file.metadata,
        dropped=dropped, unused=_unused(file, fields), tokenizer_files=lambda: tokenizer_files(file.metadata, path),
    )  # fmt: skip


def gguf_name(name: str) -> str | None:
    """The other way: the name that GGUF gives a Hugging Face tensor, or None."""
    for ours, theirs in GLOBAL_NAMES.items():
        if theirs == name:
            return ours
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    for ours, theirs in (*LAYER_NAMES.items(), *STACKED_NAMES.items()):
        if match is not None and match[2] == theirs:
            return f"blk.{match[1]}.{ours}.{match[3]}"
    return None


def _target_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return None
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _source_tensor(tensor: GgufTensor) -> SourceTensor:
    def read() -> Array:
        blocks = tensor.blocks()
        if tensor.type in PLAIN:
            return blocks.reshape(-1).view(NUMPY[tensor.type]).reshape(tensor.shape)
        return dequantize(blocks, tensor.type).reshape(tensor.shape)

    dtype = PLAIN.get(tensor.type, "F32")
    extents = (Extent(tensor.path, tensor.offset, tensor.nbytes),)
    return SourceTensor(
        tensor.name, tensor.shape, tensor.type, dtype, tensor.path, tensor.offset, read, extents=extents
    )


def _config(file: GgufFile, fields: Fields, arch: Architecture) -> dict[str, ConfigEntry]:
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConvertError("tensor token_embd.weight is missing or not a matrix", file.path)
    from_table = f"table of architectures ({fields.arch})"
    sizes = {key: fields.get(name) for key, name in SIZES.items()}
    heads, hidden, layers = (sizes[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = fields.get("attention.head_count_kv", int, heads.value)
    if fields.has("attention.key_length"):
        head_dim = fields.get("attention.key_length")
    else:
        head_dim = ConfigEntry(hidden.value // heads.value, "embedding_length / attention.head_count")
    if layers.value > len(file.tensors):
        raise fields.fail("block_count", f"{layers.value} layers in a file of {len(file.tensors)} tensors")
    _check_heads(fields, heads.value, kv_heads.value, head_dim.value)
    config = {
        "architectures": ConfigEntry([arch.class_name], from_table),
        "model_type": ConfigEntry(arch.model_type, from_table),
        **sizes,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": ConfigEntry(embedding.shape[0], "rows of token_embd.weight"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", float),
        "hidden_act": ConfigEntry("silu", from_table),
    }
    config |= rope_config(file, fields, head_dim.value, config["max_position_embeddings"].value)
    if arch.pairing == "adjacent" and "partial_rotary_factor" in config:
        text = f"differs from head_dim {head_dim.value}: llama.cpp loads no such {fields.arch}: not supported"
        raise fields.fail("rope.dimension_count", text)
    return config | _presence(file, arch) | _window(fields, arch) | _special_tokens(file)


def _check_heads(fields: Fields, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise fields.fail("attention.head_count_kv", f"{kv_heads} does not divide {heads} heads")
    width = fields.get("attention.value_length", int, head_dim).value
    if width != head_dim:
        raise fields.fail("attention.value_length", f"{width} differs from head_dim {head_dim}, which is not supported")
    if fields.raw("expert_count"):
        raise fields.fail("expert_count", "mixtures of experts are not supported")


def _presence(file: GgufFile, arch: Architecture) -> dict[str, ConfigEntry]:
    """What only the presence of a tensor tells."""
    tied = HEAD not in file.tensors
    config = {"tie_word_embeddings": ConfigEntry(tied, f"{HEAD} is {'absent' if tied else 'present'}")}
    for key, tensor in (("attention_bias", QUERY_BIAS), ("mlp_bias", "blk.0.ffn_gate.bias")):
        if arch.model_type not in ("qwen2", "phi3"):
            there = tensor in file.tensors
            config[key] = ConfigEntry(there, f"{tensor} is {'present' if there else 'absent'}")
    return config


def _window(fields: Fields, arch: Architecture) -> dict[str, ConfigEntry]:
    """A window, and what it makes of a llama."""
    if not fields.has("attention.sliding_window"):
        return {}
    window = fields.get("attention.sliding_window")
    if arch.model_type == "phi3":
        return {"sliding_window": window}
    if arch.model_type != "llama":
        raise fields.fail("attention.sliding_window", f"windows of {arch.model_type} are not supported")
    return {
        "sliding_window": window,
        "model_type": ConfigEntry(WINDOWED_LLAMA.model_type, window.origin),
        "architectures": ConfigEntry([WINDOWED_LLAMA.class_name], window.origin),
    }


def _special_tokens(file: GgufFile) -> dict[str, ConfigEntry]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: f"tokenizer.ggml.{name}_token_id" for key, name in keys.items()}
    return {
        key: ConfigEntry(token_id(file.metadata, at, file.path), at) for key, at in found.items() if at in file.metadata
    }


def _unused(file: GgufFile, fields: Fields) -> dict[str, str]:
    """The metadata that does not enter config.json. A key of the architecture that nothing read is refused."""
    unused = {}
    for key in file.metadata:
        if key in fields.used:
            continue
        if key.startswith(f"{fields.arch}.") and key != f"{fields.arch}.vocab_size":
            raise ConvertError(f"metadata {key} = {str(file.metadata[key])[:40]} is not understood", file.path)
        described = key.startswith(DESCRIPTIVE) or key == f"{fields.arch}.vocab_size"
        unused[key] = "describes the file or its tokenizer" if described else "unknown, not used"
    return unused
