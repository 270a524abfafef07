"""What GGUF's architecture names and size keys mean in Hugging Face terms: the one table.

Knows nothing of files. An architecture that is not here is refused: a file does not say how its channels are paired,
so this table must.
"""

from __future__ import annotations

from dataclasses import dataclass

from convert.rope_pairing import Pairing


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. stacked: q, k, v in one tensor; gate and up in one."""

    model_type: str
    class_name: str
    pairing: Pairing
    stacked: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", "adjacent"),
    "internlm2": Architecture("llama", "LlamaForCausalLM", "adjacent"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", "split_half", stacked=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", "split_half"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", "split_half"),
}
WINDOWED_LLAMA = Architecture("mistral", "MistralForCausalLM", "adjacent")
"""GGUF has no mistral: a llama file with a window is one."""

SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
"""Key of config.json -> key below the architecture's name, for the sizes that every file must state."""
EMBEDDING, HEAD, QUERY_BIAS = "token_embd.weight", "output.weight", "blk.0.attn_q.bias"
"""Tensors whose shape or presence says what no key does: vocab_size, whether embeddings are tied, attention_bias."""
