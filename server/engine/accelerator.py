"""What an engine uses of a device besides arithmetic, in one bundle; and what a step takes of the device's memory.

Names no device: server/engine/cuda.py makes the bundle of a GPU, the tests make one of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from model.batch import Batch, SampleBatch
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import KVLayout
from server.engine.decode_graphs import Capture
from server.engine.stream import StagedStream

MOST_LOGPROBS = 20
"""What a sampled row may ask for at its worst."""


class Meter(Protocol):
    """The device's memory, other programs on it included."""

    def free(self) -> int:
        """Bytes that can still be had, once everything issued so far is done."""
        ...

    def trim(self) -> None:
        """Give back what torch keeps for later."""
        ...


@dataclass(frozen=True)
class Accelerator:
    """capture is None where steps cannot be recorded: the operations wait for the host."""

    stream: StagedStream
    meter: Meter
    capture: Capture | None


def taken_by(meter: Meter, work: Callable[[], None]) -> int:
    """Bytes that work takes at its peak: torch keeps what it once took, so the free memory afterwards tells."""
    meter.trim()
    before = meter.free()
    work()
    return before - meter.free()


@torch.inference_mode()
def run_filler(decoder: Decoder, layout: KVLayout, lens: list[int], num_logits: int, device: torch.device) -> None:
    """Compute prompts of `lens` tokens, all on page 0, and sample num_logits rows in the most expensive way."""
    kv = KVCache(layout, (1,) * len(layout.groups), device)
    for storage in kv.storages:
        storage.zero_()
    batch = filler_batch(lens, layout, num_logits, device)
    decoder.ops.sample(decoder.forward(batch, kv), filler_sampling(num_logits, device))


def filler_batch(lens: list[int], layout: KVLayout, num_logits: int, device: torch.device) -> Batch:
    """Every slot and every page is 0; logits are wanted of num_logits rows."""
    total, longest = sum(lens), max(lens)
    table = torch.zeros(len(lens), layout.pages_for(longest), dtype=torch.int32, device=device)
    slots = torch.zeros(total, dtype=torch.int64, device=device)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    return Batch(
        token_ids=slots.clone(),
        positions=torch.cat([torch.arange(length) for length in lens]).to(device),
        slots=(slots,) * len(layout.groups),
        page_table=(table,) * len(layout.groups),
        kv_lens=kv_lens.to(device),
        q_starts=torch.cat([torch.zeros(1, dtype=torch.int32), kv_lens.cumsum(0).int()]).to(device),
        logits_rows=(torch.arange(num_logits) % total).to(device),
        max_q=longest,
        max_kv=longest,
    )


def filler_sampling(num_rows: int, device: torch.device) -> SampleBatch:
    """Every row is drawn through every filter, with as many log-probabilities as can be asked for."""
    one, zero = torch.ones(num_rows, device=device), torch.zeros(num_rows, dtype=torch.int64, device=device)
    return SampleBatch(one, zero.int(), one * 0.99, one * 1e-6, zero, zero, zero, num_logprobs=MOST_LOGPROBS)
