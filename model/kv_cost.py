"""KV-cache layout and bytes by arithmetic: the same code predicts a cost, sizes the pool and explains it.

Knows no tensors: imports neither torch nor numpy, so that a plan is printed in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SCALE_BYTES = {"float8_e4m3fn": 4, "int8": 4}
"""A quantised cache keeps one fp32 scale beside each key and each value of each head."""
DTYPE_ALIASES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""vLLM's names of cache dtypes, where they differ from torch's."""
SCRATCH_PAGES = 1
"""Page 0 of every group takes the writes of padding rows and is never given out."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens in the same shape: they share page ids.

    window: tokens a layer can see (itself included), None for all. scale_bytes: of each token and head, per tensor
    (a quantised cache stores one fp32 scale beside each key and each value).
    """

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int
    dtype: str
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of the group: 2 (k, v) * layers * kv_heads * (head_dim * dtype + scale)."""
        return 2 * len(self.layers) * self.kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes)

    def pages_at(self, context: int, page_size: int) -> int:
        """Pages of one sequence while its context-th token is computed. Those behind the window are free."""
        first = 0 if self.window is None else max(0, context - self.window)
        return (context - 1) // page_size - first // page_size + 1

    def peak_pages(self, context: int, page_size: int, chunk: int = 1) -> int:
        """The most pages that one sequence holds on its way to context, computed at most `chunk` tokens a step.

        A step of n tokens needs window - 1 + n, which may begin on the last token of a page.
        """
        whole = -(-context // page_size)
        if self.window is None:
            return whole
        span = self.window - 1 + chunk
        return min(whole, 1 if span == 1 else (span - 2) // page_size + 2)

    def shard(self, ranks: int) -> KVGroup:
        """What one of `ranks` tensor-parallel ranks holds: heads are divided; with fewer heads than ranks, copied."""
        return replace(self, kv_heads=max(1, self.kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a model's cache is cut into pages: page_size tokens, one pool and one set of page ids per group."""

    page_size: int
    groups: tuple[KVGroup, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, page rounding aside."""
        return sum(group.token_bytes for group in self.groups)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of this group."""
        return self.groups[group].token_bytes * self.page_size

    def pool_bytes(self, num_pages: tuple[int, ...]) -> int:
        """Bytes allocated for num_pages (scratch included) in each group."""
        return sum(count * self.page_bytes(index) for index, count in enumerate(num_pages))

    def pages_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def pages_at(self, context: int) -> tuple[int, ...]:
        """Per group: pages of one sequence whose last token, the context-th, is being computed."""
        return tuple(group.pages_at(context, self.page_size) for group in self.groups)

    def peak_pages(self, context: int, chunk: int = 1) -> tuple[int, ...]:
        """Per group: the most pages that one sequence holds on its way to context, at most `chunk` tokens a step."""
        return tuple(group.peak_pages(context, self.page_size, chunk) for group in self.groups)

    def shard(self, ranks: int) -> KVLayout:
        """The layout of one tensor-parallel rank. ValueError if heads and ranks do not divide each other."""
        for group in self.groups:
            if group.kv_heads % ranks and ranks % group.kv_heads:
                raise ValueError(f"{group.kv_heads} KV heads cannot be shared evenly by {ranks} tensor-parallel ranks")
        return replace(self, groups=tuple(group.shard(ranks) for group in self.groups))


def layout_for(config: ModelConfig, page_size: int, kv_dtype: str) -> KVLayout:
    """Group the layers of a model by what they keep (window, heads, dtype), in order of their first layer."""
    assert kv_dtype in DTYPE_BYTES, kv_dtype
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        layers.setdefault(window, []).append(layer)
    scale = SCALE_BYTES.get(kv_dtype, 0)
    groups = [
        KVGroup(tuple(members), window, config.num_kv_heads, config.head_dim, kv_dtype, scale)
        for window, members in layers.items()
    ]
    return KVLayout(page_size, tuple(groups))


def pages_in_budget(layout: KVLayout, budget: int, max_model_len: int, chunk: int = 1) -> tuple[int, ...]:
    """Pages per group (scratch included) that fit in budget bytes, in the proportion that a full sequence uses.

    A budget below one scratch page per group gives scratch pages alone; the caller compares with what it needs.
    """
    needs = layout.peak_pages(max_model_len, chunk)
    sequence_bytes = sum(need * layout.page_bytes(group) for group, need in enumerate(needs))
    usable = max(0, budget - layout.pool_bytes((SCRATCH_PAGES,) * len(needs)))
    return tuple(SCRATCH_PAGES + usable * need // sequence_bytes for need in needs)


def pages_for_sequences(layout: KVLayout, num_seqs: int, max_model_len: int, chunk: int = 1) -> tuple[int, ...]:
    """Pages per group (scratch included) with which num_seqs sequences of max_model_len tokens never wait."""
    return tuple(SCRATCH_PAGES + num_seqs * need for need in layout.peak_pages(max_model_len, chunk))


def capacity_tokens(layout: KVLayout, num_pages: tuple[int, ...]) -> int:
    """Tokens that the pool can keep: of the groups without a window where there are any, else of all."""
    counts = list(zip(layout.groups, num_pages, strict=True))
    whole = [count for group, count in counts if group.window is None] or [count for _, count in counts]
    return (min(whole) - SCRATCH_PAGES) * layout.page_size
