"""How wide a step may be, and how many pages the KV cache gets beside it: as asked for, else by the device's rule.

Bytes and counts only; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config import ConfigError, ModelConfig
from model.kv_cost import SCRATCH_PAGES, KVLayout, pages_for_sequences, pages_in_budget
from model.memory import default_pool_bytes
from server.engine.facts import EngineConfig
from server.engine.page_tables import PageTables
from server.engine.scheduler import Limits

SAMPLED_ARRAYS, SCORED_ARRAYS = 18, 6
"""fp32 arrays as large as the logits, held at the worst for a row that is sampled, and for one of a scored prompt.

torch, which ranks a row of wide filters whole (values, ids twice, weights and sums in float64), was seen to hold 16 of
a sampled row; native kernels hold 4.
"""
MIB = 1 << 20
DEVICE_RESERVE = 256 * MIB
"""Of a device's memory, for what no measurement sees: fragments, libraries that load late."""
GRAPH_BYTES = 8 * MIB
"""What a driver may keep for the recordings of one batch size, beside the memory that they share."""


DEVICE_CHUNK = 256
"""Prompt tokens that share a step with decodes, of each prompt that could move on, on a device that nobody measures.

A decode step reads every weight, so it leaves matrix rate / bandwidth tokens (A100 and H200: 184) of arithmetic unused;
three steps' time computes 3 * 0.65 times as many (358), if a prompt reaches 0.65 of the rate. No stream waits longer.
"""

WIDTHS = {False: (32, 512), True: (256, 4096)}
"""Sequences and tokens of a step where nobody asked: on a CPU, and on a device that is wide."""


@dataclass(frozen=True)
class Room:
    """Bytes for a cache. step: what the widest step takes. rest: for whatever else the device needs.

    is_shared: the memory serves other programs too (a CPU's), so the default takes a share of it.
    """

    free: int
    step: int
    rest: int = 0
    is_shared: bool = True

    @property
    def available(self) -> int:
        return self.free - self.step - self.rest


def limits_of(config: EngineConfig, model: ModelConfig, is_wide: bool) -> Limits:
    """Raises ConfigError for lengths that the model does not take, and for a step with room for less than a token each.

    What is asked for one of sequences and tokens bends the default of the other.
    """
    longest = model.longest_context
    wanted = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    if not 2 <= wanted <= longest:
        raise ConfigError(f"max_model_len is {wanted}: this model takes 2 to {longest} tokens (--max-model-len)")
    sequences, tokens = WIDTHS[is_wide]
    seqs = config.max_num_seqs or min(sequences, config.max_num_batched_tokens or sequences)
    budget = config.max_num_batched_tokens or max(tokens, seqs)
    if budget < seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}: a step must have room for one token of each "
            f"of max_num_seqs = {seqs} sequences"
        )
    return Limits(wanted, seqs, budget, mixed_chunk=DEVICE_CHUNK if is_wide else None)


def workspace_bytes(model: ModelConfig, limits: Limits) -> int:
    """Memory of the widest step: fp32 logits of every row that may want them, and the widest layer's activations."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = 3 * model.intermediate_size + 2 * heads + 6 * model.hidden_size
    logits = (limits.max_num_seqs * SAMPLED_ARRAYS + limits.prompt_logits * SCORED_ARRAYS) * model.vocab_size
    return 4 * (logits + limits.max_num_batched_tokens * activations)


def widest_logits(limits: Limits) -> int:
    """Rows of logits in one step, at most."""
    return limits.max_num_seqs + limits.prompt_logits


def widest_prompts(limits: Limits) -> list[int]:
    """Lengths of prompts that fill a step."""
    whole, rest = divmod(limits.max_num_batched_tokens, limits.max_model_len)
    return [limits.max_model_len] * whole + [rest] * (rest > 0)


def graphs_reserve(decode_step: int, logits: int, num_sizes: int) -> int:
    """decode_step: what one step of the largest recording takes; logits: its logits, which lie outside of it."""
    return decode_step + logits + num_sizes * GRAPH_BYTES


def num_pages(asked: int | None, layout: KVLayout, limits: Limits, room: Room) -> tuple[int, ...]:
    """Pages of each group. Raises MemoryError where `asked` bytes do not fit, or less than a page does."""
    chunk = limits.max_num_batched_tokens
    full = layout.pool_bytes(pages_for_sequences(layout, limits.max_num_seqs, limits.max_model_len, chunk))
    by_rule = default_pool_bytes(room.available, full) if room.is_shared else min(room.available, full)
    budget = by_rule if asked is None else asked
    if budget > room.available:
        raise MemoryError(
            f"a KV cache of {budget} bytes does not fit: {max(0, room.available)} bytes are available beside the "
            f"weights and the widest step (--kv-cache-memory)"
        )
    counts = pages_in_budget(layout, budget, limits.max_model_len, chunk)
    if min(counts) <= SCRATCH_PAGES:
        least = layout.pool_bytes((1 + SCRATCH_PAGES,) * len(counts))
        raise MemoryError(
            f"a KV cache of {budget} bytes leaves no page to give out: one page and scratch take {least} bytes "
            f"(raise --kv-cache-memory or lower --page-size)"
        )
    return counts


def within_pool(limits: Limits, layout: KVLayout, counts: tuple[int, ...]) -> tuple[Limits, tuple[str, ...]]:
    """Lower max_model_len to what the pool holds, with a warning."""
    capacity = PageTables(layout, counts, limits.max_num_batched_tokens).capacity()
    if capacity >= limits.max_model_len:
        return limits, ()
    if capacity < 2:
        raise MemoryError("the KV cache holds less than two tokens: give it more (--kv-cache-memory)")
    warning = f"max_model_len is lowered from {limits.max_model_len} to {capacity} tokens: the KV cache holds no more"
    return replace(limits, max_model_len=capacity), (warning,)
