"""InternLM2's folders: a Llama under other names, with q, k and v of a layer in one tensor by groups of heads.

Knows nothing of how shards are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.canonical import INTERNLM2
from convert.formats.fused import split_qkv
from convert.formats.huggingface_config import with_defaults
from convert.formats.huggingface_leftovers import leftovers
from convert.served_model import served_model
from convert.source import ConfigEntry, Source, SourceTensor

GLOBAL_NAMES = {
    "model.tok_embeddings.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
LAYER_NAME = re.compile(r"(model\.layers\.\d+\.)([a-z_0-9.]+)\.(weight|bias)")
FUSED = "attention.wqkv"


def internlm2_source(
    folder: Path, raw: Mapping[str, Any], table: dict[str, SourceTensor], tokenizer_files: Any
) -> Source:
    """The Llama that config and tensors are. Raises ConvertError where the groups do not fit the tensors."""
    names: dict[str, str] = {}
    derived: dict[str, SourceTensor] = {}
    config = _config(folder, raw)
    model = served_model({key: entry.value for key, entry in config.items()}, folder / "config.json")
    for name, tensor in table.items():
        match = LAYER_NAME.fullmatch(name)
        if name in GLOBAL_NAMES:
            names[name] = GLOBAL_NAMES[name]
        elif match is not None and match[2] in LAYER_NAMES:
            names[name] = f"{match[1]}{LAYER_NAMES[match[2]]}.{match[3]}"
        elif match is not None and match[2] == FUSED:
            target = f"{match[1]}self_attn.{{}}_proj.{match[3]}"
            derived |= split_qkv(tensor, target, model.num_heads, model.num_kv_heads, model.head_dim, by_group=True)
    dropped = leftovers(folder, {}, table)
    return Source(
        path=folder, format=INTERNLM2, architecture=INTERNLM2, pairing="split_half", config=config, names=names,
        table=table, raw=raw, derived=derived, dropped=dropped, tokenizer_files=tokenizer_files,
    )  # fmt: skip


def _config(folder: Path, raw: Mapping[str, Any]) -> dict[str, ConfigEntry]:
    """Llama's keys. Its code, bias and dtype of the cache stay behind."""
    kept = {key: value for key, value in raw.items() if key not in ("auto_map", "bias", "attn_implementation")}
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": bool(raw.get("bias"))}
    config = with_defaults(folder / "config.json", kept | said)
    return config | {key: ConfigEntry(value, "InternLM2 is a Llama") for key, value in said.items()}
