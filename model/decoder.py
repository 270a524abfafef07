"""The decoder: token ids of a batch in, hidden states or logits out, keys and values into the cache.

Knows no requests, no files and no device: everything device-bound is in the operations it is given.
Legend: T tokens, R rows with logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from model.batch import Batch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.layers import Layer, Step
from model.ops.interface import AttentionTables, Ops, PackedLinear


class LayersRunner(Protocol):
    """All layers of one decoder over one cache, in one call."""

    def __call__(self, x: Tensor, steps: Sequence[Step]) -> Tensor:
        """x [T, D] embeddings, which may be overwritten; a step per group -> [T, D] after the last norm."""
        ...


@runtime_checkable
class RunsLayers(Protocol):
    """What operations may bring besides: a way through all layers that is faster than one operation at a time."""

    def layers_runner(self, decoder: Decoder, kv: KVCache) -> LayersRunner | None:
        """With the bits of the operations. None: this decoder and cache go operation by operation."""
        ...


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
    _runners: WeakKeyDictionary[KVCache, LayersRunner | None] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        """[T, D] after the last norm, in the dtype of the weights."""
        steps = _steps(batch)
        x, runner = F.embedding(batch.token_ids, self.embedding), self._runner(kv)
        return self._one_by_one(x, steps, kv) if runner is None else runner(x, steps)

    def _runner(self, kv: KVCache) -> LayersRunner | None:
        if kv not in self._runners:
            self._runners[kv] = self.ops.layers_runner(self, kv) if isinstance(self.ops, RunsLayers) else None
        return self._runners[kv]

    def _one_by_one(self, x: Tensor, steps: Sequence[Step], kv: KVCache) -> Tensor:
        residual: Tensor | None = None
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
