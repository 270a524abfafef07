"""From a model and a device's memory to a KV pool: what is taken before it, what it holds, what a load needs.

Knows no text, no files and no weights, only their shapes. All sizes are bytes of one device (one tensor-parallel
rank); ranks are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from model.config import ModelConfig
from model.kv_cost import (
    DTYPE_BYTES,
    SCRATCH_PAGES,
    KVLayout,
    capacity_tokens,
    layout_for,
    pages_for_sequences,
    pages_in_budget,
)
from server.plan.headers import FLOATS, StoredTensor

MIB = 1 << 20
RESERVE_FRACTION = 0.05
RESERVE_LEAST = 512 * MIB
"""Python, torch and, on a GPU, its context and fragmentation: a rule of thumb that --reserve replaces."""
COPIED_PER_RANK = ("k_proj", "v_proj", "attn_k.", "attn_v.")
"""Matrices that ranks beyond the number of KV heads hold a copy of."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model under a load on devices of a size. dtype "auto" keeps the stored types, kv_dtype "auto" follows dtype."""

    config: ModelConfig
    tensors: tuple[StoredTensor, ...]
    memory: int
    context: int
    concurrency: int = 1
    page_size: int = 16
    dtype: str = "auto"
    kv_dtype: str = "auto"
    ranks: int = 1
    reserve: int | None = None
    step_tokens: int = 512

    @property
    def activation_dtype(self) -> str:
        return self.config.dtype if self.dtype == "auto" else self.dtype

    @property
    def cache_dtype(self) -> str:
        return self.activation_dtype if self.kv_dtype == "auto" else self.kv_dtype

    def layout(self) -> KVLayout:
        """Of one rank. ValueError if the ranks cannot share the heads."""
        return layout_for(self.config, self.page_size, self.cache_dtype).shard(self.ranks)

    def weights(self) -> int:
        """Matrices are divided among the ranks, vectors copied to each."""
        return sum(self._on_rank(tensor) for tensor in self.tensors)

    def _on_rank(self, tensor: StoredTensor) -> int:
        plain = tensor.dtype in FLOATS.values() and self.dtype != "auto"
        size = tensor.elements * DTYPE_BYTES[self.dtype] if plain else tensor.stored_bytes
        if len(tensor.shape) < 2:
            return size
        copied = any(name in tensor.name for name in COPIED_PER_RANK)
        return -(-size // (min(self.ranks, self.config.num_kv_heads) if copied else self.ranks))

    def packed_head(self) -> int:
        """The output matrix once more where it is tied to the embedding: CPU kernels multiply by a packed copy."""
        config = self.config
        size = config.vocab_size * config.hidden_size * DTYPE_BYTES.get(self.activation_dtype, 2)
        return -(-size // self.ranks) if config.tie_word_embeddings else 0

    def workspace(self) -> int:
        """Estimate of the worst step: the widest layer's activations, fp32 logits of every row, and the RoPE table."""
        config, ranks = self.config, self.ranks
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim // ranks
        width = 3 * config.hidden_size + max(attention, 3 * config.intermediate_size // ranks)
        activations = self.step_tokens * width * DTYPE_BYTES[self.activation_dtype]
        logits = 4 * self.step_tokens * config.vocab_size
        return activations + logits + 4 * config.max_position_embeddings * config.rotary_dim


@dataclass(frozen=True, slots=True)
class Budget:
    """Where one device's memory goes, in the order in which it is taken; pool may be negative: then nothing fits."""

    memory: int
    weights: int
    packed_head: int
    workspace: int
    reserve: int

    @property
    def pool(self) -> int:
        return self.memory - self.fixed - self.reserve

    @property
    def fixed(self) -> int:
        """What no setting of the pool changes."""
        return self.weights + self.packed_head + self.workspace


def budget_of(scenario: Scenario) -> Budget:
    reserve = scenario.reserve
    if reserve is None:
        reserve = max(RESERVE_LEAST, int(scenario.memory * RESERVE_FRACTION))
    return Budget(scenario.memory, scenario.weights(), scenario.packed_head(), scenario.workspace(), reserve)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scenario comes to on one device.

    num_pages and pool_bytes: the pool that would be allocated, scratch included. needed: bytes of the pool in which
    `concurrency` requests of `context` tokens never wait. max_concurrency: requests of `context` tokens that run at
    once; max_context: the longest of `concurrency` equal requests.
    """

    layout: KVLayout
    budget: Budget
    num_pages: tuple[int, ...]
    pool_bytes: int
    needed: int
    max_concurrency: int
    max_context: int
    capacity_tokens: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget.pool

    @property
    def missing(self) -> int:
        """Bytes that one device lacks; 0 when it fits."""
        return max(0, self.needed - self.budget.pool)


def evaluate(scenario: Scenario) -> Outcome:
    """ValueError if the ranks cannot share the heads."""
    layout, budget = scenario.layout(), budget_of(scenario)
    context, chunk = scenario.context, scenario.step_tokens

    def needed(concurrency: int, tokens: int) -> int:
        return layout.pool_bytes(pages_for_sequences(layout, concurrency, tokens, chunk))

    def fits_at(tokens: int) -> bool:
        return needed(scenario.concurrency, tokens) <= budget.pool

    one, scratch = needed(1, context), layout.pool_bytes((SCRATCH_PAGES,) * len(layout.groups))
    num_pages = pages_in_budget(layout, max(0, budget.pool), context, chunk)
    return Outcome(
        layout=layout,
        budget=budget,
        num_pages=num_pages,
        pool_bytes=layout.pool_bytes(num_pages),
        needed=needed(scenario.concurrency, context),
        max_concurrency=max(0, (budget.pool - scratch) // (one - scratch)),
        max_context=largest(fits_at, scenario.config.max_position_embeddings),
        capacity_tokens=capacity_tokens(layout, num_pages),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which a falling condition holds; 0 if it holds for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def request_bytes(layout: KVLayout, context: int) -> int:
    """Bytes of the pages that one request of `context` tokens holds while its last token is computed."""
    return sum(count * layout.page_bytes(group) for group, count in enumerate(layout.pages_at(context)))


def required_memory(scenario: Scenario, outcome: Outcome) -> int:
    """The smallest device on which the scenario fits, its own reserve rule included."""
    fixed = outcome.budget.fixed + outcome.needed
    if scenario.reserve is not None:
        return fixed + scenario.reserve
    return max(fixed + RESERVE_LEAST, math.ceil(fixed / (1 - RESERVE_FRACTION)))
