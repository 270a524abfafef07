"""The tensor names of Meta's original code, which llama2.c, Meta's shards and Mistral's own files share.

Knows nothing of files. Pairs are adjacent in all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GLOBAL_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
LAYER_NAME = re.compile(r"layers\.(\d+)\.([a-z_0-9.]+)\.weight")


def meta_name(name: str) -> str | None:
    """The other way: the name that Meta gives a Hugging Face tensor, or None where it has no such tensor."""
    for ours, theirs in GLOBAL_NAMES.items():
        if theirs == name:
            return ours
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    for ours, theirs in LAYER_NAMES.items():
        if match is not None and match[2] == theirs:
            return f"layers.{match[1]}.{ours}.weight"
    return None


def hugging_face_names(names: Iterable[str]) -> dict[str, str]:
    """Source name -> Hugging Face name, for the names that this table knows."""
    found = {}
    for name in names:
        match = LAYER_NAME.fullmatch(name)
        if name in GLOBAL_NAMES:
            found[name] = GLOBAL_NAMES[name]
        elif match is not None and match[2] in LAYER_NAMES:
            found[name] = f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return found
