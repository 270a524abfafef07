"""How many pages each group gets, and how long a request may then be: arithmetic only.

Knows bytes and layouts; measures nothing and allocates nothing.
"""

from __future__ import annotations

from model.kv_cost import SCRATCH_PAGES, KVLayout

TEMPORARIES = 6
"""fp32 arrays as large as the logits that sampling needs at its worst: copy, log-softmax, sorted values, ids twice."""


def workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Memory of the widest sampling step: num_rows of logits and what is made of them."""
    return num_rows * vocab_size * 4 * TEMPORARIES


def full_batch_pages(layout: KVLayout, max_num_seqs: int, max_model_len: int, chunk: int) -> tuple[int, ...]:
    """Per group: pages that max_num_seqs requests of full length need at their peak (scratch left out)."""
    return tuple(count * max_num_seqs for count in layout.peak_pages(max_model_len, chunk))


def pages_within(layout: KVLayout, budget: int, full_batch: tuple[int, ...]) -> tuple[int, ...]:
    """Share `budget` bytes among the groups as a full batch would; scratch pages included.

    Raises MemoryError if a group would be left without a single page to give out.
    """
    spendable = budget - layout.pool_bytes((SCRATCH_PAGES,) * len(full_batch))
    full_bytes = layout.pool_bytes(full_batch)
    counts = tuple(count * max(0, spendable) // full_bytes for count in full_batch)
    if min(counts) == 0:
        least = layout.pool_bytes((1 + SCRATCH_PAGES,) * len(counts))
        raise MemoryError(
            f"a KV cache of {budget} bytes holds no page: one page and scratch take {least} bytes; "
            f"give it more (--kv-cache-memory) or choose a smaller --page-size"
        )
    return tuple(count + SCRATCH_PAGES for count in counts)
