"""The tensors that a config implies, for a plan without weights.

Knows the Hugging Face names of a dense Llama-like decoder and nothing of files.
"""

from __future__ import annotations

import math

from model.config import ModelConfig
from model.kv_cost import DTYPE_BYTES
from server.plan.headers import StoredTensor

Shapes = dict[str, tuple[int, ...]]


def tensors_of(config: ModelConfig) -> tuple[StoredTensor, ...]:
    """Every tensor of the model, stored in the config's dtype."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config).items()}
    size = DTYPE_BYTES.get(config.dtype, 2)
    return tuple(StoredTensor(name, shape, config.dtype, math.prod(shape) * size) for name, shape in shapes.items())


def _layer(config: ModelConfig) -> Shapes:
    hidden, ffn = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.o_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    shapes: Shapes = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in matrices.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in matrices.items() if bias}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
