"""Steps that decode one token a sequence, recorded once for some batch sizes and replayed with new inputs.

Knows no policy and no device: recording is somebody else's (capture); a batch takes the next larger size, and the rows
that pad it compute the token 0 at position 0 of page 0. A step is two recordings, up to the logits and from there to
plain samples, so that rows with penalties, masks or log-probabilities replay the first and sample for themselves.
Legend: N rows of the recording, R rows in use, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch, SampleBatch, Sampled
from model.decoder import Decoder
from model.kv_cache import KVCache
from server.engine.decode_inputs import Columns, DecodeRows, blank_rows, table_start
from server.engine.last_tokens import LastTokens
from server.engine.stream import StagedStream

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Record what a function issues to the device; what comes back issues the same again, on the same memory."""

LARGEST = 512
SIZES = (1, 2, 4, *range(8, LARGEST + 1, 8))


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record, ascending: up to the first that holds max_num_seqs."""
    return SIZES[: bisect_left(SIZES, max_num_seqs) + 1]


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch size. columns: where every replay finds its inputs."""

    forward: Work
    sample: Work
    columns: Columns


class DecodeGraphs:
    """All sizes, over one set of buffers."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        stream: StagedStream,
        last: LastTokens,
        sizes: tuple[int, ...],
        max_len: int,
    ) -> None:
        """max_len: tokens of the longest sequence."""
        rows, groups, pages = sizes[-1], len(kv.layout.groups), kv.layout.pages_for(max_len)
        self.last = last
        self._decoder = decoder
        self._kv = kv
        self._stream = stream
        self._sizes = sizes
        self._max_len = max_len
        self._recordings: dict[int, Recording] = {}
        device = stream.device
        self._tables = [torch.zeros(rows, pages, dtype=torch.int32, device=device) for _ in range(groups)]
        self._inputs = torch.zeros(blank_rows(groups, pages).nbytes(rows), dtype=torch.uint8, device=device)
        self._each = torch.arange(rows + 1, device=device)  # [N + 1] i64
        self._starts = self._each.int()
        self._logits = torch.zeros(rows, decoder.config.vocab_size, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._finite = torch.zeros(rows, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self._recordings)

    # ---- recording ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def record(self, capture: Capture) -> None:
        """Record every size, the largest first: what it needs serves the smaller ones too."""
        blank = blank_rows(len(self._tables), 1)
        for size in reversed(self._sizes):
            self._send(blank, size)
            columns = Columns.of(self._inputs, size)
            forward, sample = self._forward_of(columns, size), self._sample_of(columns.sampling(size, -1))
            self._recordings[size] = Recording(capture(forward), capture(sample), columns)

    def _forward_of(self, columns: Columns, size: int) -> Work:
        token_ids, source = columns.wide[0, :size], columns.wide[1, :size]
        kv_lens = columns.narrow[0, :size]

        def forward() -> None:
            positions = kv_lens.long() - 1
            tables = tuple(table[:size] for table in self._tables)
            batch = Batch(
                token_ids=self.last.feed(token_ids, source),
                positions=positions,
                slots=tuple(slots_at(table, positions, self._kv.layout.page_size) for table in tables),
                page_table=tables,
                kv_lens=kv_lens,
                q_starts=self._starts[: size + 1],
                logits_rows=self._each[:size],
                max_q=1,
                max_kv=self._max_len,
            )
            self._logits[:size].copy_(self._decoder.logits(self._decoder.hidden(batch, self._kv)))

        return forward

    def _sample_of(self, sampling: SampleBatch) -> Work:
        size = len(sampling.seed)

        def sample() -> None:
            sampled = self._decoder.ops.sample(self._logits[:size], sampling)
            self._ids[:size].copy_(sampled.ids)
            self._finite[:size].copy_(sampled.finite)

        return sample

    # ---- replaying ----------------------------------------------------------------------------------------

    def size_for(self, num_rows: int) -> int | None:
        """The batch size that `num_rows` decodes replay; None if they are too many."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def forward(self, rows: DecodeRows, size: int) -> None:
        """Inputs to the device and everything up to the logits."""
        self._send(rows, size)
        self._recordings[size].forward()

    def _send(self, rows: DecodeRows, size: int) -> None:
        """One copy; then tables, packed as narrow as they are, go to where the recordings look for them."""
        staged = self._stream.staging(rows.nbytes(size))
        rows.write(staged.numpy(), size)
        self._stream.send(staged, self._inputs)
        start = table_start(size)
        for static, table in zip(self._tables, rows.page_table, strict=True):
            pages, end = table.shape[1], start + 4 * size * table.shape[1]
            static[:size, :pages].copy_(self._inputs[start:end].view(torch.int32).view(size, pages))
            start = end

    def sample_plain(self, num_rows: int, size: int) -> Sampled:
        """Tokens of the first num_rows rows."""
        self._recordings[size].sample()
        return Sampled(self._ids[:num_rows].clone(), self._finite[:num_rows].clone(), None, None, None)

    def logits(self, num_rows: int) -> Tensor:
        """[R, V] of the last forward, which may be overwritten."""
        return self._logits[:num_rows]

    def sampling(self, num_rows: int, size: int, num_logprobs: int) -> SampleBatch:
        """The dense part of the last forward's sampling, on the device."""
        return self._recordings[size].columns.sampling(num_rows, num_logprobs)


def slots_at(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """table [B, P] i32, positions [B] -> [B] i64: the slot of each row's position."""
    page = torch.div(positions, page_size, rounding_mode="floor").unsqueeze(1)
    return table.gather(1, page).squeeze(1).long() * page_size + positions % page_size
