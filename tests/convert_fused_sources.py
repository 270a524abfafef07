"""InternLM2's and litgpt's checkpoints made from Hugging Face tensors, laid out as their exporters lay them out.

Knows nothing of the converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

INTERNLM2 = {
    "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "lm_head": "output",
}  # fmt: skip

LITGPT = {
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
    "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.norm_q", "self_attn.k_norm": "attn.norm_k", "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj",
}  # fmt: skip


def grouped(config: dict[str, Any], parts: list[Tensor]) -> Tensor:
    """q, k and v as the exporters of both formats lay them out: one key head's queries, it, its value; and so on."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    apart = [torch.split(part, config["head_dim"]) for part in parts]
    rows: list[Tensor] = []
    for group in range(kv_heads):
        rows += apart[0][group * heads // kv_heads : (group + 1) * heads // kv_heads]
        rows += [apart[1][group], apart[2][group]]
    return torch.cat(rows)


def write_internlm2(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            state[name.replace("self_attn.q_proj", "attention.wqkv")] = grouped(config, parts)
            continue
        for ours, theirs in INTERNLM2.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    folder.mkdir()
    said: dict[str, Any] = {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoModel": "code.py"},
    }
    said["bias"] = any(name.endswith("bias") for name in state)
    (folder / "config.json").write_text(json.dumps(config | said))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


def write_litgpt(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], old: bool = False, **params: Any
) -> Path:
    """tensors: with separate projections. old: before q, k and v were stacked."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "attn.attn" if old else "attn.qkv"), torch.cat(parts)
            tensor = grouped(config, parts) if old else tensor
        for ours, theirs in LITGPT.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    said = {
        "name": "tiny", "hf_config": {"org": "o", "name": "tiny"}, "block_size": config["max_position_embeddings"],
        "n_layer": config["num_hidden_layers"], "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_query_groups": config["num_key_value_heads"], "head_size": config["head_dim"], "bias": False,
        "intermediate_size": config["intermediate_size"], "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
        "norm_eps": 1e-5, "parallel_residual": False, "rotary_percentage": 1.0, "vocab_size": 38,
        "padded_vocab_size": 40, "rope_base": 10000,
    }  # fmt: skip
    folder.mkdir()
    (folder / "model_config.yaml").write_text(yaml.safe_dump(said | params))
    torch.save({"model": state} if old else state, folder / "lit_model.pth")
    return folder
