"""From a plan to tokens: pack the batch, run the decoder, sample; a step that lacks memory is rerun by halves.

Knows no policy and no request states; names no device. launch() waits for nothing that a device computes: whatever the
host is to read is downloaded, and read in collect().
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import Batch, Sampled
from model.kv_cache import KVCache
from model.ops.interface import Ops
from server.engine.decode_graphs import DecodeGraphs
from server.engine.decode_inputs import DecodeRows
from server.engine.last_tokens import ON_HOST, LastTokens
from server.engine.launched_step import LaunchedStep, Part
from server.engine.plan import Copies, PlanRow, StepPlan
from server.engine.request import Sequence
from server.engine.sampler import (
    ScoredPrompt,
    adjusted,
    is_plain,
    most_logprobs,
    prompt_batch,
    sample_batch,
)
from server.engine.stream import Stream


class Model(Protocol):
    """What the runner asks of a decoder."""

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        """[T, D] after the last norm; keys and values are written."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] f32"""
        ...


class ModelRunner:
    """One decoder and its cache on one device."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        ops: Ops,
        vocab_size: int,
        stream: Stream,
        last: LastTokens | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """last: the device computes on after launch() returns. graphs: recorded decode steps, over the same `last`."""
        self.overlaps = last is not None
        self._model = model
        self._kv = kv
        self._ops = ops
        self._vocab_size = vocab_size
        self._stream = stream
        self._last = last
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        lack = self._copy_pages(plan.copies)
        parts = self._run(plan.rows) if lack is None else self._run_uncopied(plan, lack)
        if self._last is not None:
            pieces = [(part.samples, part.sampled.ids) for part in parts if part.sampled is not None]
            self._last.keep([([sequence for sequence, _ in samples], ids) for samples, ids in pieces])
        return LaunchedStep(parts, self._stream.mark())

    def _copy_pages(self, copies: Copies) -> str | None:
        """Pages that a row shared and is about to write. Returns what the allocator said if memory does not suffice."""
        try:
            for group, pairs in enumerate(copies):
                if pairs:
                    columns = [torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True)]
                    source, target = self._stream.upload(columns)
                    for layer in self._kv.layout.groups[group].layers:
                        self._ops.copy_pages(self._kv.layer(layer), source, target)
        except (MemoryError, RuntimeError) as error:
            return lack_of_memory(error)
        return None

    def _run_uncopied(self, plan: StepPlan, lack: str) -> list[Part]:
        """Rows that were to write a copy cannot run, the others can."""
        targets = [{target for _, target in pairs} for pairs in plan.copies]

        def lacks_copy(row: PlanRow) -> bool:
            return any(not own.isdisjoint(pages) for own, pages in zip(targets, row.sequence.pages, strict=True))

        error = f"out of memory while copying a shared page of this request ({lack})"
        parts: list[Part] = []
        for is_lacking, group in groupby(plan.rows, lacks_copy):
            rows = list(group)
            parts += [Part(rows, error=error)] if is_lacking else self._run(rows)
        return parts

    def _run(self, rows: list[PlanRow]) -> list[Part]:
        """One forward, or two of half the rows where memory does not suffice. Writing KV twice is harmless."""
        try:
            return [self._forward(rows)]
        except (MemoryError, RuntimeError) as error:
            lack = lack_of_memory(error)
        if len(rows) == 1:
            count = rows[0].end - rows[0].start
            return [Part(rows, error=f"out of memory while computing {count} tokens of this request ({lack})")]
        half = len(rows) // 2
        return self._run(rows[:half]) + self._run(rows[half:])

    def _forward(self, rows: list[PlanRow]) -> Part:
        size = self._graphs.size_for(len(rows)) if self._graphs is not None and decodes_only(rows) else None
        if self._graphs is not None and size is not None:
            part = self._replay(self._graphs, rows, size)
        else:
            part = self._run_eagerly(rows)
        if part.sampled is not None:
            part.on_host = self._download(part.sampled)
        return part

    def _replay(self, graphs: DecodeGraphs, rows: list[PlanRow], size: int) -> Part:
        samples, count = sampled_rows(rows), len(rows)
        tables = [page_table(rows, group) for group in range(len(self._kv.layout.groups))]
        kv_lens = np.array([row.end for row in rows], np.int32)
        graphs.forward(DecodeRows.of(token_ids(rows), graphs.last.sources(rows), kv_lens, tables, samples), size)
        columns = graphs.sampling(count, size, most_logprobs(samples))
        batch = adjusted(columns, samples, self._vocab_size, self._stream)
        if is_plain(batch):
            return Part(rows, samples, graphs.sample_plain(count, size))
        return Part(rows, samples, self._ops.sample(graphs.logits(count), batch))

    def _run_eagerly(self, rows: list[PlanRow]) -> Part:
        packed = pack(rows, len(self._kv.layout.groups), self._kv.layout.page_size)
        part = Part(rows, packed.samples)
        batch = self._to_device(packed, rows)
        hidden = self._model.hidden(batch, self._kv)  # [T, D]
        if packed.samples:
            logits = self._model.logits(hidden.index_select(0, batch.logits_rows))
            part.sampled = self._ops.sample(logits, sample_batch(packed.samples, self._vocab_size, self._stream))
        for index, row in enumerate(rows):
            own = hidden[int(packed.q_starts[index]) : int(packed.q_starts[index + 1])]
            request = row.sequence.request
            if targets := scored_tokens(row):
                part.scored[index] = self._score(own[: len(targets)], targets, request.params.prompt_logprobs or 0)
            if request.mean_state is not None:
                part.states[index] = self._stream.download(own)
            elif not request.generates and row.end == request.prompt_len:
                part.states[index] = self._stream.download(own[-1:])
        return part

    def _to_device(self, packed: PackedRows, rows: list[PlanRow]) -> Batch:
        columns = [packed.token_ids, packed.positions, packed.kv_lens, packed.q_starts, packed.logits_rows]
        moved = self._stream.upload([torch.from_numpy(c) for c in (*columns, *packed.slots, *packed.page_table)])
        token_ids, positions, kv_lens, q_starts, logits_rows, *by_group = moved
        groups = len(packed.slots)
        if self._last is not None:
            self._feed(self._last, token_ids, packed, rows)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=tuple(by_group[:groups]),
            page_table=tuple(by_group[groups:]),
            kv_lens=kv_lens,
            q_starts=q_starts,
            logits_rows=logits_rows,
            max_q=int(np.diff(packed.q_starts).max()),
            max_kv=int(packed.kv_lens.max()),
        )

    def _feed(self, last: LastTokens, token_ids: Tensor, packed: PackedRows, rows: list[PlanRow]) -> None:
        """Fill in the tokens [T] that the host does not know: each is the last one of its row."""
        source = last.sources(rows)
        late = np.flatnonzero(source != ON_HOST)
        if len(late):
            ends = packed.q_starts[1:].astype(np.int64)
            at, found = self._stream.upload([torch.from_numpy(ends[late] - 1), torch.from_numpy(source[late])])
            token_ids.index_copy_(0, at, last.ids.index_select(0, found))

    def _score(self, hidden: Tensor, targets: list[int], num_top: int) -> ScoredPrompt:
        """Log-probabilities of the tokens that follow each of the rows hidden [N, D]."""
        logits = self._model.logits(hidden)
        logprobs = logits.log_softmax(-1)
        (column,) = self._stream.upload([torch.tensor(targets, dtype=torch.int64).unsqueeze(1)])
        chosen = self._stream.download(logprobs.gather(1, column).squeeze(1))
        if not num_top:
            return ScoredPrompt(targets, chosen, None, None)
        best = self._download(self._ops.sample(logits, prompt_batch(len(targets), num_top, self._stream.device)))
        return ScoredPrompt(targets, chosen, best.top_ids, best.top_logprobs)

    def _download(self, sampled: Sampled) -> Sampled:
        def host(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else self._stream.download(tensor)

        ids, finite = self._stream.download(sampled.ids), self._stream.download(sampled.finite)
        return Sampled(ids, finite, host(sampled.logprobs), host(sampled.top_ids), host(sampled.top_logprobs))


def decodes_only(rows: list[PlanRow]) -> bool:
    """Whether every row computes one token and samples the next one of its own sequence, and nothing else."""
    return all(
        row.end - row.start == 1 and len(row.samples) == 1 and not row.scores_prompt and row.samples[0] is row.sequence
        for row in rows
    )


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises a plain RuntimeError where the CPU allocator fails, an AcceleratorError where a driver call does."""
    named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return named or "can't allocate memory" in str(error) or "CUDA error: out of memory" in str(error)


def lack_of_memory(error: BaseException) -> str:
    """What the allocator said; any other error goes its way."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0] if str(error) else "MemoryError"


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
        samples=sampled_rows(rows),
    )


def sampled_rows(rows: list[PlanRow]) -> list[tuple[Sequence, int]]:
    """[R] (sequence, index of the output token)"""
    return [(choice, choice.num_output + choice.num_in_flight - 1) for row in rows for choice in row.samples]


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
