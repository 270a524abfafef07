"""Sampling through the native library: the same tokens as model/ops/reference_sampling.py.

Knows no requests. Penalties and bans stay in torch: they touch few logits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.ops.reference_sampling import adjust

PTR, LONG = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, tuple[type[ctypes.c_void_p] | type[ctypes.c_int64], ...]] = {
    "rw_finite": (PTR, LONG, LONG, PTR),
    "rw_sample": (PTR, LONG, LONG, *(PTR,) * 9),
    "rw_logprobs": (PTR, LONG, LONG, *(PTR,) * 4, LONG),
}


def sample(native: ctypes.CDLL, logits: Tensor, batch: SampleBatch) -> Sampled:
    """logits [R, V] f32 (may be overwritten) -> Sampled; see model/batch.py."""
    logits = logits.contiguous()
    if all(change is None for change in (batch.bias, batch.allowed, batch.repetition, batch.frequency)):
        ids, finite = _choose(native, logits, batch)
        return _with_logprobs(native, logits, ids, finite, batch.num_logprobs)
    unchanged = logits.clone() if batch.num_logprobs >= 0 else logits
    sound = torch.empty(logits.shape[0], dtype=torch.bool)
    native.rw_finite(logits.data_ptr(), *logits.shape, sound.data_ptr())
    ids, finite = _choose(native, adjust(logits, batch), batch)
    return _with_logprobs(native, unchanged, ids, finite & sound, batch.num_logprobs)


def _choose(native: ctypes.CDLL, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """ids [R] i64, finite [R] bool. Greedy rows are read once."""
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    finite = torch.empty(logits.shape[0], dtype=torch.bool)
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.choice, batch.index)
    pointers = (column.data_ptr() for column in (*columns, ids, finite))
    native.rw_sample(logits.data_ptr(), *logits.shape, *pointers)
    return ids, finite


def _with_logprobs(native: ctypes.CDLL, logits: Tensor, ids: Tensor, finite: Tensor, count: int) -> Sampled:
    """logits [R, V]: unchanged by penalties."""
    if count < 0:
        return Sampled(ids, finite, None, None, None)
    rows, count = len(ids), min(count, logits.shape[1])
    chosen, top = torch.empty(rows), torch.empty(rows, count)
    top_ids = torch.empty(rows, count, dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (ids, chosen, top_ids, top))
    native.rw_logprobs(logits.data_ptr(), *logits.shape, *pointers, count)
    return Sampled(ids, finite, chosen, top_ids if count else None, top if count else None)
