"""The decoder: token ids of a batch in, hidden states or logits out, keys and values into the cache.

Knows no requests, no files and no device: everything device-bound is in the operations it is given.
Legend: T tokens, R rows with logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.batch import Batch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.layers import Layer, Step
from model.ops.interface import AttentionTables, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class Decoder:
    """RMSNorm, RoPE, grouped-query attention and SwiGLU; Llama, Mistral, Phi-3 and Qwen differ by flags of the config.

    warnings: what the checkpoint made us decide, one sentence each, for the operator.
    """

    config: ModelConfig
    ops: Ops
    embedding: Tensor  # [V, D]
    layers: tuple[Layer, ...]
    norm: Tensor  # [D]
    head: PackedLinear  # D -> V
    cos_sin: Tensor  # [positions, n] f32
    warnings: tuple[str, ...] = ()

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        """[T, D] after the last norm, in the dtype of the weights."""
        steps = _steps(batch)
        x, residual = F.embedding(batch.token_ids, self.embedding), None
        for index, layer in enumerate(self.layers):
            step = steps[kv.group_of(index)]
            x, residual = self.ops.add_rms_norm(x, residual, layer.attention_norm, self.config.rms_norm_eps)
            x = layer.attention(x, self.ops, self.cos_sin, step, kv.layer(index))
            x, residual = self.ops.add_rms_norm(x, residual, layer.mlp_norm, self.config.rms_norm_eps)
            x = layer.mlp(x, self.ops)
        return self.ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """Logits [R, V] f32 of batch.logits_rows, in their order."""
        return self.logits(self.hidden(batch, kv).index_select(0, batch.logits_rows))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> [R, V] f32."""
        return self.ops.linear(hidden, self.head, torch.float32)

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the weights in memory; a head that shares the embedding counts once."""
        head = 0 if self.head.shares(self.embedding) else self.head.nbytes
        return self.embedding.nbytes + sum(layer.nbytes for layer in self.layers) + self.norm.nbytes + head


def _steps(batch: Batch) -> list[Step]:
    """One Step per group of layers."""
    return [
        Step(
            batch.positions,
            slots,
            AttentionTables(page_table, batch.kv_lens, batch.q_starts, batch.max_q, batch.max_kv),
        )
        for slots, page_table in zip(batch.slots, batch.page_table, strict=True)
    ]
