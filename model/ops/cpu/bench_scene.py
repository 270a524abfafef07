"""What the benchmark of the CPU operations runs on: shapes of known models, random weights, sequences in a cache.

Knows no clock and no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch
from model.config import ModelConfig
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import SCALE_BYTES, KVGroup, KVLayout
from model.layers import MLP, Attention, Layer
from model.ops.interface import AttentionTables, Ops, PackedLinear
from model.rope import cos_sin_table
from model.weights import HEAD_QUANTIZATION

PAGE_SIZE = 16
MAX_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, and what one token costs in them."""

    name: str
    config: ModelConfig

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of a layer's matrices: qkv, out, gate and up, down."""
        config, hidden = self.config, self.config.hidden_size
        heads = config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        return (qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        return self.config.num_layers * sum(outputs * inputs for outputs, inputs in self.linears)

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size


def _shape(name: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }
    return Shape(name, ModelConfig.from_dict(raw))


SHAPES = {
    "135m": _shape("SmolLM2-135M", 49152, 576, 1536, 30, 9, 3),
    "1b": _shape("Llama-3.2-1B", 128256, 2048, 8192, 16, 32, 8),
}


@dataclass(frozen=True, slots=True)
class Model:
    """Random weights behind one kind of operations; every layer in memory of its own."""

    ops: Ops
    shape: Shape
    decoder: Decoder
    linears: list[PackedLinear]  # four a layer

    @classmethod
    def of(cls, ops: Ops, shape: Shape, dtype: torch.dtype, quantization: str | None = None) -> Model:
        config = shape.config
        norm = torch.ones(config.hidden_size, dtype=dtype)
        samples = [random_weight(size, dtype) for size in shape.linears]
        packed = [
            ops.pack_linear(sample.clone(), None, quantization) for _ in range(config.num_layers) for sample in samples
        ]
        layers = []
        for qkv, out, gate_up, down in zip(*(packed[part::4] for part in range(4)), strict=True):
            attention = Attention(qkv, out, None, None, 1e-5, config.attention_scale, None)
            layers.append(Layer(norm, attention, norm, MLP(gate_up, down)))
        embedding = random_weight((config.vocab_size, config.hidden_size), dtype)
        head = ops.pack_linear(embedding, None, quantization and HEAD_QUANTIZATION)
        table = cos_sin_table(config, MAX_POSITIONS, "cpu")
        return cls(ops, shape, Decoder(config, ops, embedding, tuple(layers), norm, head, table), packed)

    @property
    def layer_bytes(self) -> int:
        """Of the matrices of all layers, as they are packed."""
        return sum(linear.nbytes for linear in self.linears)

    def all_linears(self, inputs: dict[int, Tensor]) -> None:
        """Every matrix of the layers once; inputs: width -> rows of it."""
        for width, linear in zip(self._widths(), self.linears, strict=True):
            self.ops.linear(inputs[width], linear)

    def _widths(self) -> Iterator[int]:
        for _ in range(self.shape.config.num_layers):
            yield from (inputs for _, inputs in self.shape.linears)


def random_weight(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[N, K], scaled so that a product keeps the size of its input."""
    return torch.randn(size).mul_(1 / math.sqrt(size[1])).to(dtype)


def filled_cache(config: ModelConfig, pages: int, dtype: str) -> KVCache:
    """A cache of one group whose slots hold random values, of a quantised one with one scale."""
    layers, scale_bytes = tuple(range(config.num_layers)), SCALE_BYTES.get(dtype, 0)
    group = KVGroup(layers, None, config.num_kv_heads, config.head_dim, dtype, scale_bytes)
    cache = KVCache(KVLayout(PAGE_SIZE, (group,)), (pages,), "cpu")
    for storage in cache.storages:
        if scale_bytes:
            storage.random_(0, 64)
        else:
            storage.normal_()
    for kv in map(cache.layer, layers):
        for scales in (kv.k_scale, kv.v_scale):
            if scales is not None:
                scales.fill_(0.02)
    return cache


@dataclass(frozen=True, slots=True)
class Scene:
    """Sequences of equal length, each asking with its last rows, on a cache of their own."""

    shape: Shape
    batch: Batch
    cache: KVCache

    @classmethod
    def of(cls, shape: Shape, sequences: int, length: int, asked: int, dtype: torch.dtype) -> Scene:
        """dtype: of the cache."""
        config, pages = shape.config, -(-length // PAGE_SIZE)
        cache = filled_cache(config, sequences * pages + 1, str(dtype).removeprefix("torch."))
        table = (torch.randperm(sequences * pages) + 1).to(torch.int32).view(sequences, pages)
        positions = torch.arange(length - asked, length).repeat(sequences)
        page = table.long().repeat_interleave(asked, 0).gather(1, (positions // PAGE_SIZE).unsqueeze(1)).squeeze(1)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * asked
        batch = Batch(
            torch.randint(0, config.vocab_size, (sequences * asked,)), positions,
            (page * PAGE_SIZE + positions % PAGE_SIZE,), (table,),
            torch.full((sequences,), length, dtype=torch.int32), starts, starts[1:].long() - 1, asked, length,
        )  # fmt: skip
        return cls(shape, batch, cache)

    @property
    def kv_bytes(self) -> int:
        return self.cache.layout.token_bytes * int(self.batch.kv_lens.sum())

    @property
    def attention_flops(self) -> float:
        """Of the pairs that a causal mask leaves, in all layers."""
        config, keys = self.shape.config, float((self.batch.positions + 1).sum())
        return 4 * keys * config.num_layers * config.num_heads * config.head_dim

    def all_attention(self, ops: Ops, q: Tensor) -> None:
        """Attention of every layer once; q [T, Hq, d]."""
        batch = self.batch
        tables = AttentionTables(batch.page_table[0], batch.kv_lens, batch.q_starts, batch.max_q, batch.max_kv)
        for layer in range(self.shape.config.num_layers):
            ops.attention(q, self.cache.layer(layer), tables, self.shape.config.attention_scale, None)
