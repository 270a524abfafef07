"""litgpt's folders (model_config.yaml, lit_model.pth): Llama, Mistral, Qwen and Phi-3 with q, k and v in one tensor.

Knows nothing of pickles or YAML's grammar. Tensors called attn.attn are of the time when q, k and v were interleaved by
group; since they are called attn.qkv they lie on top of each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from convert.errors import ConvertError
from convert.formats.fused import split_qkv, stack
from convert.formats.huggingface import tokenizer_texts
from convert.formats.litgpt_config import litgpt_config
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.source import Source, SourceTensor

CONFIG, WEIGHTS = "model_config.yaml", "lit_model.pth"
LONGEST_CONFIG = 1 << 20
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
GLOBAL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
LAYER_NAMES = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "attn.norm_q": "self_attn.q_norm",
    "attn.norm_k": "self_attn.k_norm",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
LAYER_NAME = re.compile(r"transformer\.h\.(\d+)\.([a-z_0-9.]+)\.(weight|bias)")
GROUPED, STACKED = "attn.attn", "attn.qkv"


def is_litgpt(folder: Path) -> bool:
    """Both of its files."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def open_litgpt(folder: Path) -> Source:
    """Raises ConvertError for settings that no model we serve has, each by its key."""
    params = _read_yaml(folder / CONFIG)
    state = read_torch(folder / WEIGHTS)
    inner = state.get("model", state)
    if not isinstance(inner, dict) or not all(isinstance(name, str) for name in inner):
        raise ConvertError("'model' is not a dictionary of tensors", folder / WEIGHTS)
    table = state_tensors(folder / WEIGHTS, inner)
    config = litgpt_config(folder / CONFIG, params, table)
    names, derived = _names(table, {key: entry.value for key, entry in config.items()})
    dropped = {HEAD: f"equals {EMBEDDING}"} if config["tie_word_embeddings"].value and HEAD in table else {}
    return Source(
        path=folder, format="litgpt", architecture=config["model_type"].value, pairing="split_half", config=config,
        names={name: target for name, target in names.items() if name not in dropped}, table=table, raw=params,
        derived=derived, dropped=dropped, tokenizer_files=lambda: tokenizer_texts(folder),
    )  # fmt: skip


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LONGEST_CONFIG:
        raise ConvertError(f"longer than {LONGEST_CONFIG} bytes", path)
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConvertError(f"not YAML: {' '.join(str(error).split())[:200]}", path) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConvertError("not a YAML mapping", path)
    return value


def _names(
    table: Mapping[str, SourceTensor], config: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, SourceTensor]]:
    names: dict[str, str] = {}
    derived: dict[str, SourceTensor] = {}
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    for name, tensor in table.items():
        match = LAYER_NAME.fullmatch(name)
        if name in GLOBAL_NAMES:
            names[name] = GLOBAL_NAMES[name]
        elif match is not None and match[2] in (GROUPED, STACKED):
            target = f"model.layers.{match[1]}.self_attn.{{}}_proj.{match[3]}"
            derived |= split_qkv(tensor, target, heads, kv_heads, head_dim, by_group=match[2] == GROUPED)
        elif match is not None and match[2] in LAYER_NAMES:
            names[name] = f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return (names, derived) if config["model_type"] != "phi3" else _restacked(table, names, derived)


def _restacked(
    table: Mapping[str, SourceTensor], names: dict[str, str], derived: dict[str, SourceTensor]
) -> tuple[dict[str, str], dict[str, SourceTensor]]:
    """phi3 keeps q, k, v in one tensor, and gate and up: the pieces of each layer are put together again."""
    pieces = derived | {target: table[name] for name, target in names.items()}
    stacked: dict[str, SourceTensor] = {}
    for target in pieces:
        if target.endswith(".q_proj.weight"):
            parts = [pieces[target.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            stacked[target.replace(".q_proj.", ".qkv_proj.")] = stack(parts, "q, k and v on top of each other")
        elif target.endswith(".gate_proj.weight") and (up := target.replace(".gate_", ".up_")) in pieces:
            stacked[target.replace(".gate_", ".gate_up_")] = stack([pieces[target], pieces[up]], "gate on top of up")
    kept = {name: target for name, target in names.items() if ".gate_proj." not in target and ".up_proj." not in target}
    return kept, stacked
