"""Sampling on the device: launches, and the few steps that torch does as well.

Knows no requests. The tokens of model/ops/reference_sampling.py, without its questions to the host.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.ops.reference_sampling import adjust
from model.ops.triton.kernels.sampling import draw_kernel, gather_kernel, summary_kernel

BLOCK = 4096
"""Logits that a program looks at in one go; fixed, as sums run block by block."""
LOW_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Summary:
    """Of each row of logits."""

    best: Tensor  # [R] i64, the lowest id of the largest; 0 where not finite
    top: Tensor  # [R] f32
    log_sum: Tensor  # [R] f32, of exp(logits - top)
    finite: Tensor  # [R] i8

    @classmethod
    def of(cls, logits: Tensor) -> Summary:
        """logits [R, V] f32."""
        rows, vocabulary = logits.shape
        chunks = -(-vocabulary // BLOCK)
        tops, sums = logits.new_empty(2, rows, chunks).unbind(0)
        places = logits.new_empty(rows, chunks, dtype=torch.int32)
        summary_kernel[(rows, chunks)](logits, tops, sums, places, vocabulary, chunks, BLOCK=BLOCK, num_warps=8)
        top, log_sum = logits.new_empty(2, rows).unbind(0)
        best, finite = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.int8)
        gather_kernel[(rows,)](
            tops, sums, places, best, top, log_sum, finite, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1
        )
        return cls(best, top, log_sum, finite)


def sample(logits: Tensor, batch: SampleBatch) -> Sampled:
    """logits [R, V] f32 (overwritten) -> Sampled; see model/batch.py."""
    plain, summary = logits, Summary.of(logits)
    adjusted, finite = summary, summary.finite.bool()
    if any(part is not None for part in (batch.repetition, batch.frequency, batch.bias, batch.allowed)):
        plain = logits.clone() if batch.num_logprobs >= 0 else logits
        logits = adjust(logits, batch)
        adjusted = Summary.of(logits)
        finite = finite & adjusted.finite.bool()
    ids = _draw(logits, adjusted, batch)
    if batch.num_logprobs < 0:
        return Sampled(ids, finite, None, None, None)
    shift = summary.top + summary.log_sum
    logprobs = plain.gather(1, ids.unsqueeze(1)).squeeze(1) - shift
    if batch.num_logprobs == 0:
        return Sampled(ids, finite, logprobs, None, None)
    values, top_ids = _ranked(plain, batch.num_logprobs)
    return Sampled(ids, finite, logprobs, top_ids, values - shift.unsqueeze(1))


def _draw(logits: Tensor, summary: Summary, batch: SampleBatch) -> Tensor:
    rows, vocabulary = logits.shape
    ids = torch.empty_like(summary.best)
    draw_kernel[(rows,)](
        logits, summary.best, summary.top, summary.finite, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
        batch.seed, batch.choice, batch.index, ids, vocabulary, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return ids


def _ranked(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The count largest of each row of x [R, V] and their ids, best first, ties to the lowest id.

    Value and id become one integer, so that no two are equal and topk has no choice.
    """
    bits = (x + 0.0).view(torch.int32)  # -0 and 0 tie
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(x.shape[1], device=x.device)
    best = ((ordered << 32) | (LOW_WORD - ids)).topk(min(count, x.shape[1]), dim=-1).values
    top_ids = LOW_WORD - (best & LOW_WORD)
    return x.gather(1, top_ids), top_ids
