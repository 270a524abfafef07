"""Rows for tests of a sampler: what each asks for, alike or all different.

Knows no sampler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.batch import SampleBatch

INF = float("inf")


def settings(rows: int, num_logprobs: int = -1, **fields: Any) -> SampleBatch:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "choice": 0, "index": 0}
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    given = {name: fields.pop(name, value) for name, value in plain.items()}
    tensors: dict[str, Any] = {
        name: torch.as_tensor(value, dtype=dtypes.get(name, torch.int64)).expand(rows).contiguous()
        for name, value in given.items()
    }
    return SampleBatch(**tensors, num_logprobs=num_logprobs, **fields)


def mixed(rows: int, **fields: Any) -> SampleBatch:
    row = torch.arange(rows)
    return settings(
        rows,
        temperature=torch.tensor([0.0, 0.7, 1.0, 3.0, 0.05])[row % 5],
        top_k=torch.tensor([0, 5, 300, 0, 40, 1])[row % 6],
        top_p=torch.tensor([1.0, 0.9, 0.5, 1.0])[row % 4],
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.001])[row % 7],
        seed=row * 7919 - 3,
        choice=row % 3,
        index=row % 11,
        **fields,
    )


def pick(batch: SampleBatch, rows: Tensor) -> SampleBatch:
    """Some of the rows, by index; nothing of what penalties and bans bring."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "index")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})
