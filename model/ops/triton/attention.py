"""Paged attention on a GPU: how work is cut into programs, and the launches.

Knows shapes and the chip's size, no device code. Nothing here reads a tensor: grids come from shapes and from
tables.max_q and tables.max_kv, so that a launch can be captured in a CUDA graph and replayed with other lengths.
Legend: B sequences, T tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from model.ops.interface import KV_CUT, AttentionTables, LayerKV
from model.ops.triton import cache
from model.ops.triton.kernels.attention import decode_kernel, merge_kernel, prefill_kernel

FIXED_SPLIT = 8 * KV_CUT
"""Keys of a split where the result must not depend on the batch."""
LEAST_SPLIT = 2 * KV_CUT
"""Keys below which a split costs more than it gives."""
MERGED = 4096
"""Channels that a merge holds at a time. Nothing is compiled for one number of splits: a step may have any."""
PROGRAMS_A_PROCESSOR = 2
STAGES = 5
"""Page ids are fetched a stage ahead of the keys they lead to; that leaves two tiles of keys and values in flight."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def decode_tile(group: int, channels: int, dtype: torch.dtype) -> Tile:
    """For the query heads of one token; a matrix instruction wants 16 rows."""
    return Tile(max(16, triton.next_power_of_2(group)), _keys(channels, dtype), 4, STAGES)


def prefill_tile(group: int, channels: int, dtype: torch.dtype, is_plain: bool) -> Tile:
    """For a block of tokens. Keys of 8 bits (not is_plain) are widened in registers, which leaves fewer for rows."""
    rows = 32 if dtype == torch.float32 else 128 if channels <= 128 and is_plain else 64
    return Tile(max(rows, triton.next_power_of_2(group)), _keys(channels, dtype), 8, STAGES)


def invariant_tile(group: int, channels: int, dtype: torch.dtype) -> Tile:
    """One for both, so that a row goes through the same instructions whoever computes it."""
    rows = 32 if dtype == torch.float32 else 64
    return Tile(max(rows, triton.next_power_of_2(group)), _keys(channels, dtype), 8, STAGES)


def _keys(channels: int, dtype: torch.dtype) -> int:
    return (KV_CUT if channels <= 128 else KV_CUT // 2) // (2 if dtype == torch.float32 else 1)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The launches for one chip. processors: of the chip, to decide how far a long sequence is shared out."""

    processors: int
    batch_invariant: bool

    def __call__(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        """q [T, Hq, d] -> [T, Hq * d]; rows that belong to no sequence come out zero."""
        tokens, sequences = q.shape[0], tables.page_table.shape[0]
        mixed = tables.max_q > 1 or sequences != tokens
        new = torch.zeros if mixed else torch.empty
        out = new(tokens, q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if tables.max_q > 1:
            self._prefill(q, kv, tables, out, scale, window)
        self._decode(q, kv, tables, out, scale, window)
        return out

    def _prefill(
        self, q: Tensor, kv: LayerKV, tables: AttentionTables, out: Tensor, scale: float, window: int | None
    ) -> None:
        group, channels = q.shape[1] // kv.k.shape[1], triton.next_power_of_2(q.shape[2])
        if self.batch_invariant:
            tile = invariant_tile(group, channels, q.dtype)
        else:
            tile = prefill_tile(group, channels, q.dtype, is_plain=cache.kind(kv) == "")
        sequences = tables.page_table.shape[0]
        blocks = q.shape[0] // (tile.rows // group) + sequences  # an upper bound: every sequence may end with a rest
        prefill_kernel[(blocks, kv.k.shape[1])](
            q, *cache.pointers(kv), tables.page_table, tables.kv_lens, tables.q_starts, out, scale * math.log2(math.e),
            sequences, tables.page_table.stride(0), *cache.strides(kv), CACHE=cache.kind(kv),
            WINDOW=window or 0, G=group, HEAD_DIM=q.shape[2], M=tile.rows, N=tile.keys, D=channels, PAGE=kv.page_size,
            SPLIT=FIXED_SPLIT if self.batch_invariant else 0, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _decode(
        self,
        q: Tensor,
        kv: LayerKV,
        tables: AttentionTables,
        out: Tensor,
        scale: float,
        window: int | None,
    ) -> None:
        group, channels = q.shape[1] // kv.k.shape[1], triton.next_power_of_2(q.shape[2])
        tile = (invariant_tile if self.batch_invariant else decode_tile)(group, channels, q.dtype)
        sequences, kv_heads = tables.page_table.shape[0], kv.k.shape[1]
        splits = self.splits(sequences * kv_heads, tables.max_kv)
        slots = triton.cdiv(tables.max_kv, FIXED_SPLIT) if self.batch_invariant else splits
        parts = out if splits == 1 else q.new_empty(sequences, q.shape[1], slots, q.shape[2], dtype=torch.float32)
        marks = out if splits == 1 else q.new_empty(sequences, q.shape[1], slots, 2, dtype=torch.float32)
        shared = {
            "WINDOW": window or 0, "HEAD_DIM": q.shape[2], "N": tile.keys, "D": channels,
            "SPLIT": FIXED_SPLIT if self.batch_invariant else 0, "LEAST": LEAST_SPLIT,
        }  # fmt: skip
        decode_kernel[(sequences, kv_heads, splits)](
            q, *cache.pointers(kv), tables.page_table, tables.kv_lens, tables.q_starts, out, parts, marks,
            scale * math.log2(math.e), tables.page_table.stride(0), *cache.strides(kv), splits, slots,
            CACHE=cache.kind(kv), G=group, M=tile.rows, PAGE=kv.page_size, IN_PLACE=splits == 1,
            num_warps=tile.warps, num_stages=tile.stages, **shared,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(sequences, q.shape[1])](
                parts, marks, tables.kv_lens, tables.q_starts, out, splits, slots,
                S=1 if self.batch_invariant else MERGED // channels, num_warps=4, **shared,
            )  # fmt: skip

    def splits(self, programs: int, max_kv: int) -> int:
        """Programs that share the keys of one sequence and KV head."""
        wanted = -(-PROGRAMS_A_PROCESSOR * self.processors // programs)
        shortest = FIXED_SPLIT if self.batch_invariant else LEAST_SPLIT
        return max(1, min(wanted, -(-max_kv // shortest)))
