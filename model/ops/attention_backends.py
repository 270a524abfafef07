"""Attention kernels of other packages behind the signature of Ops.attention.

Knows their published calls and our page layout, neither kernels nor whether a package may be used.
Legend: T tokens, B sequences, P pages of the longest, Hq query heads, Hkv KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from model.ops.interface import AttentionTables, LayerKV

Attention = Callable[[Tensor, LayerKV, AttentionTables, float, int | None], Tensor]
"""Ops.attention."""
WORKSPACE = 128 << 20
"""Bytes that FlashInfer recommends for its partial results."""


class FlashAttention3:
    """flash_attn_with_kvcache: it looks up the pages itself and asks the host nothing, so that it can be recorded."""

    def __init__(self, flash_attn_with_kvcache: Callable[..., Tensor]) -> None:
        self._attend = flash_attn_with_kvcache

    def __call__(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        """q [T, Hq, d] -> [T, Hq * d]. The cache goes as a view [pages, page_size, Hkv, d]."""
        out = self._attend(
            q, kv.k.transpose(1, 2), kv.v.transpose(1, 2), cache_seqlens=tables.kv_lens, page_table=tables.page_table,
            cu_seqlens_q=tables.q_starts, max_seqlen_q=tables.max_q, softmax_scale=scale, causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )  # fmt: skip
        if tables.max_q == 1 and tables.page_table.shape[0] == q.shape[0]:  # every row has its sequence
            return out.flatten(1)
        owned = torch.arange(q.shape[0], device=q.device) < tables.q_starts[-1]
        return out.flatten(1).masked_fill_(~owned.unsqueeze(1), 0.0)


@dataclass
class Planned:
    """A wrapper, and the tables that it was last planned for."""

    wrapper: Any  # flashinfer.BatchPrefillWithPagedKVCacheWrapper
    tables: AttentionTables | None = None


@dataclass
class FlashInfer:
    """One wrapper a window. A batch is planned on the host, once for all layers that share its tables."""

    new_wrapper: Callable[[], Any]
    plans: dict[int | None, Planned] = field(default_factory=dict)

    def __call__(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        """q [T, Hq, d] -> [T, Hq * d]; waits for the device where tables are new."""
        if window not in self.plans:
            self.plans[window] = Planned(self.new_wrapper())
        plan = self.plans[window]
        if plan.tables is not tables:
            plan.wrapper.plan(
                *page_lists(tables, kv.page_size), q.shape[1], kv.k.shape[1], q.shape[2], kv.page_size, causal=True,
                sm_scale=scale, window_left=-1 if window is None else window - 1, q_data_type=q.dtype,
                kv_data_type=kv.k.dtype,
            )  # fmt: skip
            plan.tables = tables
        out = torch.zeros_like(q)  # rows of no sequence are not written
        plan.wrapper.run(q, (kv.k, kv.v), out=out)
        return out.flatten(1)


def page_lists(tables: AttentionTables, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """On the host, i32: first row of each sequence [B + 1], first page [B + 1], all pages, tokens of the last [B]."""
    lens, table = tables.kv_lens.cpu(), tables.page_table.cpu()
    pages = (lens + page_size - 1) // page_size
    starts = torch.cat((pages.new_zeros(1), pages.cumsum(0).int()))
    held = torch.arange(table.shape[1]) < pages.unsqueeze(1)
    return tables.q_starts.cpu(), starts, table[held], lens - (pages - 1) * page_size


def load_flash_attention(device: torch.device) -> Attention:
    return FlashAttention3(import_module("flash_attn_interface").flash_attn_with_kvcache)


def load_flashinfer(device: torch.device) -> Attention:
    make = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return FlashInfer(lambda: make(workspace, "HND"))
