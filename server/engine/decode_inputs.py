"""The inputs of a recorded decode step in one buffer: columns at places fixed by the batch size, then page tables.

Knows the rows of a plan and bytes; no model and no device. A buffer for N rows holds, with pitch p >= N,
    i64 [5, p]  token ids, sources, seeds, choices, output indices
    f32 [3, p]  temperatures, top_p, min_p
    i32 [2, p]  lengths (this step's token included), top_k
and the page table [N, P] i32 of each group. Rows from R on are padding: token 0 at position 0 of page 0, greedy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import SampleBatch
from server.engine.last_tokens import ON_HOST
from server.engine.request import Sequence

LEAST_PITCH = 4
"""Elements; every column begins at a multiple of 16 bytes."""
COLUMN_BYTES = 5 * 8 + 3 * 4 + 2 * 4
PAD_WIDE = np.array([[0], [ON_HOST], [0], [0], [0]], np.int64)
PAD_REAL = np.array([[0], [1], [0]], np.float32)
PAD_NARROW = np.array([[1], [0]], np.int32)


@dataclass(frozen=True, slots=True)
class Columns:
    """Views into a buffer, or values of their own."""

    wide: Tensor  # [5, p] i64
    real: Tensor  # [3, p] f32
    narrow: Tensor  # [2, p] i32

    @classmethod
    def of(cls, buffer: Tensor, size: int) -> Columns:
        """buffer [N] u8."""
        pitch = max(LEAST_PITCH, size)
        wide, real, narrow = torch.split(buffer[: COLUMN_BYTES * pitch], [40 * pitch, 12 * pitch, 8 * pitch])
        return cls(
            wide.view(torch.int64).view(5, pitch),
            real.view(torch.float32).view(3, pitch),
            narrow.view(torch.int32).view(2, pitch),
        )

    def sampling(self, rows: int, num_logprobs: int) -> SampleBatch:
        """The dense part for the first rows."""
        temperature, top_p, min_p = self.real[:, :rows].unbind(0)
        seed, choice, index = self.wide[2:, :rows].unbind(0)
        return SampleBatch(temperature, self.narrow[1, :rows], top_p, min_p, seed, choice, index, num_logprobs)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R sequences that compute one token each."""

    wide: NDArray[np.int64]  # [5, R]
    real: NDArray[np.float32]  # [3, R]
    narrow: NDArray[np.int32]  # [2, R]
    page_table: list[NDArray[np.int32]]  # per group [R, P]

    @classmethod
    def of(
        cls,
        token_ids: NDArray[np.int64],
        source: NDArray[np.int64],
        kv_lens: NDArray[np.int32],
        page_table: list[NDArray[np.int32]],
        samples: list[tuple[Sequence, int]],
    ) -> DecodeRows:
        """samples [R]: (sequence, index of the output token)."""
        count, params = len(samples), [sequence.request.params for sequence, _ in samples]
        wide, narrow = np.empty((5, count), np.int64), np.empty((2, count), np.int32)
        wide[0], wide[1] = token_ids, source
        wide[2] = [p.seed for p in params]
        wide[3] = [sequence.choice for sequence, _ in samples]
        wide[4] = [index for _, index in samples]
        real = np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32).T
        narrow[0], narrow[1] = kv_lens, [p.top_k for p in params]
        return cls(wide, real, narrow, page_table)

    def nbytes(self, size: int) -> int:
        """Of a buffer for `size` rows with these tables."""
        columns = sum(int(table.shape[1]) for table in self.page_table)
        return table_start(size) + 4 * size * columns

    def write(self, buffer: NDArray[np.uint8], size: int) -> None:
        """Fill buffer [nbytes(size)], padding included."""
        count, pitch = self.wide.shape[1], max(LEAST_PITCH, size)
        start = 0
        for values, blank in ((self.wide, PAD_WIDE), (self.real, PAD_REAL), (self.narrow, PAD_NARROW)):
            end = start + values.itemsize * len(values) * pitch
            block = buffer[start:end].view(values.dtype).reshape(len(values), pitch)
            block[:, :count], block[:, count:] = values, blank
            start = end
        for table in self.page_table:
            end = start + 4 * size * table.shape[1]
            block = buffer[start:end].view(np.int32).reshape(size, table.shape[1])
            block[:count], block[count:] = table, 0
            start = end


def blank_rows(groups: int, pages: int) -> DecodeRows:
    """No rows: nothing but padding, with tables of `pages` columns."""
    tables = [np.zeros((0, pages), np.int32)] * groups
    return DecodeRows(PAD_WIDE[:, :0], PAD_REAL[:, :0], PAD_NARROW[:, :0], tables)


def table_start(size: int) -> int:
    """First byte of the tables."""
    return COLUMN_BYTES * max(LEAST_PITCH, size)
