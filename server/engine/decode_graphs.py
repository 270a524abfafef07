"""Steps that decode one token a sequence, recorded once for some batch sizes and replayed with new inputs.

Knows no policy and no device: recording is somebody else's (capture); a batch takes the next larger size, and the rows
that pad it compute the token 0 at position 0 of page 0. A step is two recordings, up to the logits and from there to
plain samples, so that rows with penalties, masks or log-probabilities replay the first and sample for themselves.
Legend: N rows of the recording, R rows in use, P pages of the longest sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.batch import Batch, SampleBatch, Sampled
from model.decoder import Decoder
from model.kv_cache import KVCache
from server.engine.last_tokens import ON_HOST, LastTokens
from server.engine.sampler import dense_part, with_dense_part
from server.engine.stream import Stream, places

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Record what a function issues to the device; what comes back issues the same again, on the same memory."""

LARGEST = 512
SIZES = (1, 2, 4, *range(8, LARGEST + 1, 8))
PAD_SAMPLING = SampleBatch(
    temperature=torch.zeros(1),
    top_k=torch.zeros(1, dtype=torch.int32),
    top_p=torch.ones(1),
    min_p=torch.zeros(1),
    seed=torch.zeros(1, dtype=torch.int64),
    choice=torch.zeros(1, dtype=torch.int64),
    index=torch.zeros(1, dtype=torch.int64),
    num_logprobs=-1,
)
"""A greedy row."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record, ascending: up to the first that holds max_num_seqs."""
    return SIZES[: bisect_left(SIZES, max_num_seqs) + 1]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The inputs of R sequences that compute one token each, on the host."""

    token_ids: Tensor  # [R] i64
    source: Tensor  # [R] i64: where in LastTokens the token is, or ON_HOST
    kv_lens: Tensor  # [R] i32, this step's token included
    page_table: list[Tensor]  # per group [R, P] i32
    sampling: SampleBatch  # the dense part is used

    def padded(self, size: int) -> list[Tensor]:
        """All inputs with `size` rows; the shapes of all but the tables, which come last, depend on size alone."""
        more = size - len(self.token_ids)
        ids, source = pad(self.token_ids, (0, more)), pad(self.source, (0, more), value=ON_HOST)
        columns = zip(dense_part(self.sampling), dense_part(PAD_SAMPLING), strict=True)
        return [
            ids,
            source,
            pad(self.kv_lens, (0, more), value=1),
            *(torch.cat((column, blank.expand(more))) for column, blank in columns),
            *(pad(table, (0, 0, 0, more)) for table in self.page_table),
        ]


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch size. sampling: its columns where every replay finds them."""

    forward: Work
    sample: Work
    sampling: SampleBatch


class DecodeGraphs:
    """All sizes, over one set of buffers."""

    def __init__(
        self, decoder: Decoder, kv: KVCache, stream: Stream, last: LastTokens, sizes: tuple[int, ...], max_len: int
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
        self._inputs = torch.zeros(places(self._blank(rows, pages))[-1], dtype=torch.uint8, device=device)
        self._each = torch.arange(rows + 1, device=device)  # [N + 1] i64
        self._starts = self._each.int()
        self._logits = torch.zeros(rows, decoder.config.vocab_size, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._finite = torch.zeros(rows, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self._recordings)

    def _blank(self, rows: int, pages: int) -> list[Tensor]:
        """The inputs of nothing but padding."""
        none, tables = torch.zeros(0, dtype=torch.int64), torch.zeros(0, pages, dtype=torch.int32)
        sampling = with_dense_part(PAD_SAMPLING, [column[:0] for column in dense_part(PAD_SAMPLING)])
        return DecodeRows(none, none, none.int(), [tables] * len(self._kv.layout.groups), sampling).padded(rows)

    # ---- recording ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def record(self, capture: Capture) -> None:
        """Record every size, the largest first: what it needs serves the smaller ones too."""
        for size in reversed(self._sizes):
            token_ids, source, kv_lens, *rest = self._stream.upload(self._blank(size, 1), self._inputs)
            columns = rest[: len(dense_part(PAD_SAMPLING))]
            sampling = with_dense_part(PAD_SAMPLING, columns)
            forward = self._forward_of(token_ids, source, kv_lens)
            self._recordings[size] = Recording(capture(forward), capture(self._sample_of(sampling)), sampling)

    def _forward_of(self, token_ids: Tensor, source: Tensor, kv_lens: Tensor) -> Work:
        size = len(token_ids)

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
        views = self._stream.upload(rows.padded(size), self._inputs)
        for static, table in zip(self._tables, views[-len(self._tables) :], strict=True):
            static[:size, : table.shape[1]].copy_(table)
        self._recordings[size].forward()

    def sample_plain(self, num_rows: int, size: int) -> Sampled:
        """Tokens of the first num_rows rows."""
        self._recordings[size].sample()
        return Sampled(self._ids[:num_rows].clone(), self._finite[:num_rows].clone(), None, None, None)

    def unsampled(self, num_rows: int, size: int) -> tuple[Tensor, list[Tensor]]:
        """Logits [R, V] of the last forward, which may be overwritten, and the columns [R] of its sampling."""
        columns = dense_part(self._recordings[size].sampling)
        return self._logits[:num_rows], [column[:num_rows] for column in columns]


def slots_at(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """table [B, P] i32, positions [B] -> [B] i64: the slot of each row's position."""
    page = torch.div(positions, page_size, rounding_mode="floor").unsqueeze(1)
    return table.gather(1, page).squeeze(1).long() * page_size + positions % page_size
