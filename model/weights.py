"""From a canonical folder to a Decoder: the table of names, the expected shapes, and which matrices are fused.

Knows no operations beyond pack_linear and no device beyond its name. Tensors stream: beside what is already packed, the
parts of one fused matrix and their join are in memory, and what packing needs for a block of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.decoder import Decoder
from model.layers import MLP, Attention, Layer
from model.ops.interface import Ops, PackedLinear
from model.rope import cos_sin_table, regime_warnings
from model.tensor_shapes import EMBEDDING, HEAD

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""

HEAD_QUANTIZATION = "int8"


def load_decoder(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """Read the safetensors of folder. max_positions: the longest context that will be served, which the rotary table
    covers and some scalings go by (the model's own length by default).

    quantization applies to the layers; the head is then rounded to 8 bits, embedding and norms stay.
    Raises WeightsError; its message names file and tensor.
    """
    reader = _Reader(Checkpoint.open(folder), config, ops, device, dtype, quantization)
    embedding = reader.tensor(EMBEDDING, config.vocab_size, config.hidden_size)
    layers = []
    for index in range(config.num_layers):
        layers.append(reader.layer(index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    norm = reader.tensor("model.norm.weight", config.hidden_size)
    head, warnings = reader.head(embedding)
    reader.checkpoint.finish()
    context = max_positions or config.max_position_embeddings
    table = cos_sin_table(config, context, device)
    return Decoder(
        config, ops, embedding, tuple(layers), norm, head, table, warnings + regime_warnings(config, context)
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    checkpoint: Checkpoint
    config: ModelConfig
    ops: Ops
    device: torch.device | str
    dtype: torch.dtype
    quantization: str | None

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, shape, self.dtype, self.device)

    def layer(self, index: int) -> Layer:
        hidden, prefix = self.config.hidden_size, f"model.layers.{index}"
        return Layer(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            attention=self.attention(f"{prefix}.self_attn", self.config.windows[index]),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self.mlp(f"{prefix}.mlp"),
        )

    def attention(self, prefix: str, window: int | None) -> Attention:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{prefix}.q_proj": q, f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv}
        parts = {f"{prefix}.qkv_proj": q + 2 * kv} if config.fused else parts
        return Attention(
            qkv=self.fused(parts, config.hidden_size, config.qkv_bias),
            out=self.fused({f"{prefix}.o_proj": config.hidden_size}, q, config.o_bias),
            q_norm=self.tensor(f"{prefix}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.tensor(f"{prefix}.k_norm.weight", config.head_dim) if config.qk_norm else None,
            norm_eps=config.rms_norm_eps,
            scale=config.attention_scale,
            window=window,
        )

    def mlp(self, prefix: str) -> MLP:
        config, width = self.config, self.config.intermediate_size
        parts = {f"{prefix}.gate_proj": width, f"{prefix}.up_proj": width}
        parts = {f"{prefix}.gate_up_proj": 2 * width} if config.fused else parts
        down = {f"{prefix}.down_proj": config.hidden_size}
        return MLP(
            gate_up=self.fused(parts, config.hidden_size, config.mlp_bias),
            down=self.fused(down, width, config.mlp_bias),
        )

    def fused(self, parts: dict[str, int], inputs: int, bias: bool) -> PackedLinear:
        """One packed linear over the outputs of several, in their order. parts: name -> output features."""
        weights = [self.tensor(f"{name}.weight", outputs, inputs) for name, outputs in parts.items()]
        biases = [self.tensor(f"{name}.bias", outputs) for name, outputs in parts.items() if bias]
        return self.ops.pack_linear(_joined(weights), _joined(biases) if bias else None, self.quantization)

    def head(self, embedding: Tensor) -> tuple[PackedLinear, tuple[str, ...]]:
        """The output matrix: the embedding if the config ties them, unless the file says otherwise."""
        if self.config.tie_word_embeddings and HEAD not in self.checkpoint:
            return self.packed_head(embedding), ()
        weight = self.tensor(HEAD, self.config.vocab_size, self.config.hidden_size)
        if not self.config.tie_word_embeddings:
            return self.packed_head(weight), ()
        if torch.equal(weight, embedding):
            return self.packed_head(embedding), ()
        warning = f"config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}: {HEAD} is used"
        return self.packed_head(weight), (warning,)

    def packed_head(self, weight: Tensor) -> PackedLinear:
        """Never below 8 bits: the logits are what sampling sees."""
        return self.ops.pack_linear(weight, None, None if self.quantization is None else HEAD_QUANTIZATION)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
