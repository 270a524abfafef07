"""From a plan to tokens: pack the batch, run the decoder, sample; a step that lacks memory is rerun by halves.

Knows no policy and no request states; names no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from model.batch import Batch, Sampled
from model.kv_cache import KVCache
from model.ops.interface import Ops
from server.engine.messages import TokenLogprob
from server.engine.plan import PlanRow, RowResult, StepPlan
from server.engine.request import Sequence
from server.engine.sampler import prompt_batch, prompt_logprobs, sample_batch, sampled_tokens


class Model(Protocol):
    """What the runner asks of a decoder."""

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        """[T, D] after the last norm; keys and values are written."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] f32"""
        ...


@dataclass(slots=True)
class Part:
    """Rows that went through the decoder together, or the one that could not."""

    rows: list[PlanRow]
    samples: list[tuple[Sequence, int]] = field(default_factory=list)
    sampled: Sampled | None = None
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # by index in rows
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)  # rows whose prompt samples nothing and ended in NaN
    error: str | None = None

    def results(self) -> list[RowResult]:
        if self.error is not None:
            return [RowResult(error=self.error) for _ in self.rows]
        tokens = iter(sampled_tokens(self.samples, self.sampled) if self.sampled is not None else ())
        return [
            RowResult(
                tokens=[next(tokens) for _ in row.samples],
                prompt_logprobs=self.prompt_logprobs.get(index, []),
                embedding=self.embeddings.get(index),
                finite=index not in self.broken,
            )
            for index, row in enumerate(self.rows)
        ]


@dataclass(slots=True)
class LaunchedStep:
    parts: list[Part]

    def collect(self) -> list[RowResult]:
        return [result for part in self.parts for result in part.results()]


class ModelRunner:
    """One decoder and its cache. overlaps: the device computes on after launch() returns."""

    def __init__(
        self, model: Model, kv: KVCache, ops: Ops, vocab_size: int, device: torch.device, overlaps: bool = False
    ) -> None:
        self.overlaps = overlaps
        self._model = model
        self._kv = kv
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._last_sampled: dict[int, Tensor] = {}  # id(sequence) -> [] i64, its token in the step before

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for group, copies in enumerate(plan.copies):
            if copies:
                self._copy_pages(group, copies)
        step = LaunchedStep(self._run(plan.rows))
        if self.overlaps:
            self._last_sampled = {
                id(sequence): part.sampled.ids[index]
                for part in step.parts
                if part.sampled is not None
                for index, (sequence, _) in enumerate(part.samples)
            }
        return step

    def _copy_pages(self, group: int, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, dtype=torch.int64, device=self._device).unbind(1)
        for layer in self._kv.layout.groups[group].layers:
            self._ops.copy_pages(self._kv.layer(layer), source, target)

    def _run(self, rows: list[PlanRow]) -> list[Part]:
        """One forward, or two of half the rows where memory does not suffice. Writing KV twice is harmless."""
        try:
            return [self._forward(rows)]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else "MemoryError"
        if len(rows) == 1:
            count = rows[0].end - rows[0].start
            return [Part(rows, error=f"out of memory while computing {count} tokens of this request ({reason})")]
        half = len(rows) // 2
        return self._run(rows[:half]) + self._run(rows[half:])

    @torch.inference_mode()
    def _forward(self, rows: list[PlanRow]) -> Part:
        packed = pack(rows, len(self._kv.layout.groups), self._kv.layout.page_size)
        batch = self._to_device(packed, rows)
        hidden = self._model.hidden(batch, self._kv)  # [T, D]
        part = Part(rows, samples=packed.samples)
        if packed.samples:
            logits = self._model.logits(hidden.index_select(0, batch.logits_rows))
            inputs = sample_batch(packed.samples, self._vocab_size, self._device)
            part.sampled = self._ops.sample(logits, inputs)
        for index, row in enumerate(rows):
            own = hidden[int(packed.q_starts[index]) : int(packed.q_starts[index + 1])]
            request = row.sequence.request
            if targets := scored_tokens(row):
                part.prompt_logprobs[index] = self._score(own[: len(targets)], targets, request.params.prompt_logprobs)
            if request.mean_state is not None:
                request.mean_state.add(row.start, own.double().cpu().numpy())
            if not request.generates and row.end == request.prompt_len:
                self._end_unsampled(part, index, own[-1])
        return part

    def _end_unsampled(self, part: Part, index: int, last: Tensor) -> None:
        """An embedding is the state of the last token [D], or the mean of all, scaled to length one."""
        request = part.rows[index].sequence.request
        state = last if request.mean_state is None else torch.from_numpy(request.mean_state.value())
        if not state.isfinite().all():
            part.broken.append(index)
        elif request.kind == "embed":
            part.embeddings[index] = tuple(normalize(state.float(), dim=0).tolist())

    def _to_device(self, packed: PackedRows, rows: list[PlanRow]) -> Batch:
        def tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(values).to(self._device)

        token_ids = tensor(packed.token_ids)
        for index, row in enumerate(rows):
            if row.end > len(row.sequence.tokens):
                token_ids[int(packed.q_starts[index + 1]) - 1] = self._last_sampled[id(row.sequence)]
        return Batch(
            token_ids=token_ids,
            positions=tensor(packed.positions),
            slots=tuple(tensor(slots) for slots in packed.slots),
            page_table=tuple(tensor(table) for table in packed.page_table),
            kv_lens=tensor(packed.kv_lens),
            q_starts=tensor(packed.q_starts),
            logits_rows=tensor(packed.logits_rows),
            max_q=int(np.diff(packed.q_starts).max()),
            max_kv=int(packed.kv_lens.max()),
        )

    def _score(self, hidden: Tensor, targets: list[int], num_top: int | None) -> list[TokenLogprob]:
        """Log-probabilities of the tokens that follow each of the rows hidden [N, D]."""
        logits = self._model.logits(hidden)
        logprobs = logits.log_softmax(-1)
        best = self._ops.sample(logits, prompt_batch(len(targets), num_top or 0, self._device))
        return prompt_logprobs(logprobs, targets, best, num_top or 0)


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises a plain RuntimeError where the CPU allocator fails."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def scored_tokens(row: PlanRow) -> list[int]:
    """The prompt tokens whose log-probability the row's logits tell: those after each of its rows."""
    end = min(row.end + 1, row.sequence.request.prompt_len)
    return row.sequence.tokens[row.start + 1 : end].tolist() if row.scores_prompt else []


@dataclass(slots=True)
class PackedRows:
    """The batch on the host. One logits row a sample: forks repeat their parent's."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: list[NDArray[np.int64]]  # per group [T]
    page_table: list[NDArray[np.int32]]  # per group [B, P]
    kv_lens: NDArray[np.int32]  # [B]
    q_starts: NDArray[np.int32]  # [B + 1]
    logits_rows: NDArray[np.int64]  # [R]
    samples: list[tuple[Sequence, int]]  # [R] (sequence, index of the output token)


def pack(rows: list[PlanRow], num_groups: int, page_size: int) -> PackedRows:
    starts = np.array([row.start for row in rows], np.int64)
    ends = np.array([row.end for row in rows], np.int64)
    counts = ends - starts
    q_starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(rows)), counts)  # [T] the row of each token
    positions = np.arange(q_starts[-1]) - np.repeat(q_starts[:-1] - starts, counts)
    tables = [page_table(rows, group) for group in range(num_groups)]
    return PackedRows(
        token_ids=token_ids(rows),
        positions=positions,
        slots=[table[owner, positions // page_size] * np.int64(page_size) + positions % page_size for table in tables],
        page_table=tables,
        kv_lens=ends.astype(np.int32),
        q_starts=q_starts.astype(np.int32),
        logits_rows=np.repeat(q_starts[1:] - 1, [len(row.samples) for row in rows]),
        samples=[(choice, choice.num_output + choice.num_in_flight - 1) for row in rows for choice in row.samples],
    )


def token_ids(rows: list[PlanRow]) -> NDArray[np.int64]:
    """[T]; 0 stands for a token that is still on the device."""
    ids: list[int] = []
    for row in rows:
        tokens = row.sequence.tokens
        if row.end - row.start == 1:
            ids.append(tokens[row.start] if row.start < len(tokens) else 0)
        else:
            ids.extend(tokens[row.start : row.end])
    return np.array(ids, np.int64)


def page_table(rows: list[PlanRow], group: int) -> NDArray[np.int32]:
    """[B, P]"""
    pages = [row.sequence.pages[group] for row in rows]
    table = np.zeros((len(rows), max(len(held) for held in pages)), np.int32)
    for line, held in zip(table, pages, strict=True):
        line[: len(held)] = held
    return table
