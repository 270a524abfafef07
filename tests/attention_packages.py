"""Stand-ins for flash-attn 3 and FlashInfer: their published calls, with what their documentation says in plain torch.

Knows of our page layout what a call is handed. Slots that no row may see are cleared before they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, causal: bool) -> Tensor:
    """q [L, Hq, d], k and v [S, Hkv, d] -> [L, Hq, d]: the mask is aligned to the bottom right; left < 0: no window."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    place = torch.arange(rows).unsqueeze(1) + keys - rows
    seen = torch.arange(keys) <= (place if causal else keys)
    if left >= 0:
        seen = seen & (torch.arange(keys) >= place - left)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.masked_fill(~seen.any(0)[:, None, None], 0.0)).to(q.dtype)


def flash_attn_with_kvcache(
    q: Tensor,  # [T, Hq, d] with cu_seqlens_q
    k_cache: Tensor,  # [pages, page_size, Hkv, d]
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """The signature of flash-attn 3; rows of no sequence come out as NaN, as undefined memory may."""
    assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
    assert softmax_scale is not None and max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert {x.dtype for x in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1 and cu_seqlens_q.is_contiguous()
    assert q.dtype == k_cache.dtype == v_cache.dtype
    out = torch.full_like(q, torch.nan)
    for index, (start, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        pages, length = page_table[index].long(), int(cache_seqlens[index])
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[start:end] = attend_rows(q[start:end], keys, values, softmax_scale, window_size[0], causal)
    return out


@dataclass
class PrefillWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, as far as it is used; plans are counted."""

    float_workspace_buffer: Tensor
    kv_layout: str = "NHD"
    planned: dict[str, Any] = field(default_factory=dict)
    plans: int = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {part.dtype for part in lists} == {torch.int32} and len(paged_kv_indices) == paged_kv_indptr[-1]
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        self.planned, self.plans = dict(locals()), self.plans + 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert self.kv_layout == "HND" and out.shape == q.shape and q.dtype == self.planned["q_data_type"]
        plan, shape = self.planned, (self.planned["num_kv_heads"], self.planned["page_size"], q.shape[2])
        assert all(cache.shape[1:] == shape and cache.dtype == plan["kv_data_type"] for cache in paged_kv_cache)
        bounds, pages = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for index, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            held = plan["paged_kv_indices"][pages[index] : pages[index + 1]].long()
            length, rows = (len(held) - 1) * plan["page_size"] + last, slice(bounds[index], bounds[index + 1])
            keys, values = (cache[held].transpose(1, 2).flatten(0, 1)[:length] for cache in paged_kv_cache)
            out[rows] = attend_rows(q[rows], keys, values, plan["sm_scale"], plan["window_left"], plan["causal"])
        return out
