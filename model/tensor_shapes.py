"""Every tensor that a config implies, by its Hugging Face name, with its shape: for converting and for planning.

Knows nothing of files and of tensor libraries.
"""

from __future__ import annotations

from model.config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape ([out, in] for matrices), in the order of the layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {EMBEDDING: (vocab, hidden)}
    layer = _layer(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (vocab, hidden)
    return shapes


def _layer(config: ModelConfig) -> dict[str, Shape]:
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
    if config.fused:
        stacked = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
        for name, parts in stacked.items():
            cut = [matrices.pop(f"{name.split('.')[0]}.{part}_proj") for part in parts]
            matrices[name] = (sum(rows for rows, _, _ in cut), hidden, cut[0][2])
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in matrices.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in matrices.items() if bias}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
