"""Attention over a paged cache in plain torch, with bits that do not depend on batch, chunk or page size.

Knows pages and positions, not requests. Keys are cut at multiples of KV_CUT positions. Each cut gives a row maximum, a
sum and a weighted value of fixed shape; cuts merge in index order, so a row sees the same additions whether it is
decoded or recomputed as prefill. A cut that a row cannot see merges as an exact zero.
Legend: B sequences, L query tokens of each, g query heads per KV head, C cuts, N = L * g rows padded to 4s,
J granules of a cut (a granule: the longest run that divides both page and cut).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.interface import KV_CUT, AttentionTables, LayerKV
from model.ops.quantised_kv import dequantise

ROW_MULTIPLE = 4
BLOCK_ELEMENTS = 1 << 22
"""Keys, values and scores held at a time; bounds memory and has no influence on the result."""
LOWEST = torch.finfo(torch.float32).min
AS_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def paged_attention(q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
    """q [T, Hq, d] -> [T, Hq * d]; every sequence owns at least one row, rows that belong to none come out zero."""
    tokens, heads, head_dim = q.shape
    sequences = tables.page_table.shape[0]
    if sequences == 1 or (tables.max_q == 1 and sequences == tokens):
        asked = q.view(sequences, -1, heads, head_dim)
        if sequences == 1 and tables.max_q < tokens:  # padding rows behind the only sequence
            asked = asked[:, : tables.max_q]
        out = _attend(asked, kv, tables.page_table, tables.kv_lens, scale, window, tables.max_kv).flatten(0, 1)
        return F.pad(out, (0, 0, 0, tokens - out.shape[0]))
    return _mixed(q, kv, tables, scale, window)


def _mixed(q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
    """Sequences with one row go together, each longer chunk alone."""
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    starts = tables.q_starts.tolist()
    kv_lens = tables.kv_lens.tolist()
    spans = list(itertools.pairwise(starts))
    single = [index for index, (start, end) in enumerate(spans) if end - start == 1]
    groups = [([index], *span) for index, span in enumerate(spans) if span[1] - span[0] > 1]
    for members, start, end in groups:
        rows = q[start:end].unsqueeze(0)
        pick = torch.tensor(members, device=q.device)
        out[start:end] = _picked(rows, kv, tables, pick, scale, window, kv_lens[members[0]])[0]
    if single:
        pick = torch.tensor(single, device=q.device)
        at = tables.q_starts.index_select(0, pick).long()
        longest = max(kv_lens[index] for index in single)
        answers = _picked(q.index_select(0, at).unsqueeze(1), kv, tables, pick, scale, window, longest)
        out.index_copy_(0, at, answers.squeeze(1))
    return out


def _picked(
    q: Tensor, kv: LayerKV, tables: AttentionTables, pick: Tensor, scale: float, window: int | None, max_kv: int
) -> Tensor:
    pages, lens = tables.page_table.index_select(0, pick), tables.kv_lens.index_select(0, pick)
    return _attend(q, kv, pages, lens, scale, window, max_kv)


def _attend(
    q: Tensor, kv: LayerKV, page_table: Tensor, kv_lens: Tensor, scale: float, window: int | None, max_kv: int
) -> Tensor:
    """q [B, L, Hq, d]: the last L tokens of each sequence -> [B, L, Hq * d]."""
    batch, length, heads, head_dim = q.shape
    kv_heads = kv.k.shape[1]
    rows = q.view(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
    rows = _wide(rows.reshape(batch, kv_heads, -1, head_dim)) * scale
    rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % ROW_MULTIPLE))  # [B, Hkv, N, d]
    view = _View.of(kv_lens, length, rows.shape[2], heads // kv_heads, window)
    state = rows.new_zeros(batch, kv_heads, rows.shape[2], head_dim + 1)  # weighted values, then the sum of weights
    top = rows.new_full((batch, 1, kv_heads, rows.shape[2], 1), LOWEST)
    num_cuts = view.num_cuts(max_kv)
    step = max(1, BLOCK_ELEMENTS // (batch * kv_heads * KV_CUT * (rows.shape[2] + 3 * head_dim)))
    for start in range(0, num_cuts, step):
        cuts = view.first_cut + torch.arange(start, min(start + step, num_cuts), device=q.device)  # [B, C]
        state, top = _merge(state, top, *_cut_pieces(rows, kv, page_table, cuts, view))
    values, weights = torch.split(state, [head_dim, 1], dim=-1)
    out: Tensor = values / weights.clamp(min=1.0)  # the best key seen weighs exactly 1
    out = out.narrow(2, 0, length * (heads // kv_heads)).view(batch, kv_heads, length, -1, head_dim)
    return out.transpose(1, 2).reshape(batch, length, heads * head_dim).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _View:
    """Which positions each row may see: oldest <= position <= newest."""

    newest: Tensor  # [B, N] i64; -1 for padding rows
    oldest: Tensor  # [B, N]
    first_cut: Tensor  # [B, 1]
    window: int | None
    length: int

    @classmethod
    def of(cls, kv_lens: Tensor, length: int, num_rows: int, group: int, window: int | None) -> _View:
        token = torch.div(torch.arange(num_rows, device=kv_lens.device), group, rounding_mode="floor")
        start = kv_lens.long().unsqueeze(1) - length  # [B, 1]
        newest = torch.where(token < length, start + token, -1)
        if window is None:
            return cls(newest, torch.zeros_like(newest), torch.zeros_like(start), None, length)
        first = torch.div((start - window + 1).clamp(min=0), KV_CUT, rounding_mode="floor")
        return cls(newest, newest - window + 1, first, window, length)

    def num_cuts(self, max_kv: int) -> int:
        whole = -(-max_kv // KV_CUT)
        if self.window is None:
            return whole
        return min(whole, (self.window + self.length - 3) // KV_CUT + 2)


def _cut_pieces(
    rows: Tensor, kv: LayerKV, page_table: Tensor, cuts: Tensor, view: _View
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each cut: the row maximum [B, C, Hkv, N, 1], weighted values [B, C, Hkv, N, d], sum of weights."""
    batch, num_cuts = cuts.shape
    _, kv_heads, num_rows, head_dim = rows.shape
    shape = (batch, num_cuts, kv_heads, num_rows)
    position = (cuts.unsqueeze(2) * KV_CUT + torch.arange(KV_CUT, device=cuts.device)).unsqueeze(2)  # [B, C, 1, 64]
    newest, oldest = view.newest.view(batch, 1, -1, 1), view.oldest.view(batch, 1, -1, 1)
    seen = (position <= newest) & (position >= oldest)  # [B, C, N, 64]
    held = (position <= newest.amax(2, keepdim=True)) & (position >= oldest[:, :, :1])
    index = _rows_of_cuts(kv, page_table, cuts)
    keys = _wide(_gather(kv.k, kv.k_scale, index))  # [B * C * Hkv, 64, d]
    values = _wide(_zero_unless(_gather(kv.v, kv.v_scale, index), held, kv_heads))
    asked = rows.unsqueeze(1).expand(*shape, head_dim).reshape(-1, num_rows, head_dim)
    scores = torch.bmm(asked, keys.transpose(1, 2)).view(*shape, KV_CUT)
    scores = scores.masked_fill_(~seen.unsqueeze(2), -math.inf)
    best = scores.detach().amax(-1, keepdim=True).clamp(min=LOWEST)
    weights = torch.exp_(scores.sub_(best))
    weighted = torch.bmm(weights.view(-1, num_rows, KV_CUT), values).view(*shape, head_dim)
    return best, weighted, weights.sum(-1, keepdim=True)


def _wide(x: Tensor) -> Tensor:
    """At least fp32: half precision widens, float64 stays (for gradient checks)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _merge(state: Tensor, top: Tensor, best: Tensor, weighted: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the cuts into state [B, Hkv, N, d + 1] one after the other, rescaled to the maximum so far."""
    tops = torch.cat((top, best), dim=1).cummax(1).values  # [B, 1 + C, Hkv, N, 1]
    before, after = tops[:, :-1], tops[:, 1:]
    pieces = torch.cat((weighted, sums), dim=-1) * torch.exp(best - after)
    for keep, piece in zip(torch.exp(before - after).unbind(1), pieces.unbind(1), strict=True):
        state = state * keep + piece
    return state, after[:, -1:]


def _rows_of_cuts(kv: LayerKV, page_table: Tensor, cuts: Tensor) -> Tensor:
    """Rows of the cache, seen as [pages * Hkv * parts, granule * d], that hold the cuts: [B * C * Hkv * J]."""
    _, kv_heads, page_size, _ = kv.k.shape
    granule = math.gcd(page_size, KV_CUT)
    parts = page_size // granule
    start = cuts.unsqueeze(2) * KV_CUT + torch.arange(0, KV_CUT, granule, device=cuts.device)  # [B, C, J]
    logical = torch.div(start, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    page = page_table.gather(1, logical.flatten(1)).view_as(start).long().unsqueeze(2)  # [B, C, 1, J]
    head = torch.arange(kv_heads, device=cuts.device).unsqueeze(1)
    part = torch.div(start % page_size, granule, rounding_mode="floor").unsqueeze(2)
    return ((page * kv_heads + head) * parts + part).flatten()


def _gather(cache: Tensor, scale: Tensor | None, index: Tensor) -> Tensor:
    """The picked rows as cuts [B * C * Hkv, 64, d], in the cache's dtype; of a quantised cache in fp32."""
    if scale is not None:
        return dequantise(_gather_strided(cache, index), _gather_strided(scale, index))
    granule = math.gcd(cache.shape[2], KV_CUT)
    picked = cache.view(-1, granule * cache.shape[3]).index_select(0, index)
    return picked.view(-1, KV_CUT, cache.shape[3])


def _gather_strided(cache: Tensor, index: Tensor) -> Tensor:
    """cache [pages, Hkv, page_size, ...], whose heads' pages lie apart -> [B * C * Hkv, 64, ...]."""
    granule = math.gcd(cache.shape[2], KV_CUT)
    parts = cache.shape[2] // granule
    rows = cache.view(-1, parts, granule, *cache.shape[3:])
    picked: Tensor = rows[torch.div(index, parts, rounding_mode="floor"), index % parts]
    return picked.view(-1, KV_CUT, *cache.shape[3:])


def _zero_unless(values: Tensor, held: Tensor, kv_heads: int) -> Tensor:
    """values [B * C * Hkv, 64, d] with the slots nobody may see cleared: they can hold NaN, and 0 * NaN is NaN.

    The bits are cleared by an integer and, several times as fast as a masked fill.
    """
    batch, num_cuts = held.shape[:2]
    whole = AS_INT[values.element_size()]
    bits = values.detach().view(whole).view(batch, num_cuts, kv_heads, KV_CUT, -1)
    bits.bitwise_and_(-held.view(batch, num_cuts, 1, KV_CUT, 1).to(whole))
    return values
