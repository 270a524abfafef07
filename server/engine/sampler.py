"""Requests to SampleBatch, Sampled to tokens: what each row's parameters mean for its logits.

Knows no model and no schedule. A row depends on its own sequence alone: its parameters, its history, its output index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import SampleBatch, Sampled
from server.engine.messages import TokenLogprob
from server.engine.plan import SampledToken
from server.engine.request import Sequence
from server.engine.stream import Stream

Triple = tuple[Tensor, Tensor, Tensor]
Entries = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens, values of one row
BANNED = -math.inf
DENSE = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "index")


def sample_batch(rows: list[tuple[Sequence, int]], vocab_size: int, stream: Stream) -> SampleBatch:
    """On the device; one entry a row: (sequence, index of the output token to sample)."""
    columns = sample_columns(rows)
    return adjusted(with_dense_part(columns, stream.upload(dense_part(columns))), rows, vocab_size, stream)


def sample_columns(rows: list[tuple[Sequence, int]]) -> SampleBatch:
    """The dense part, on the host."""
    params = [sequence.request.params for sequence, _ in rows]
    return SampleBatch(
        temperature=_column([p.temperature for p in params], np.float32),
        top_k=_column([p.top_k for p in params], np.int32),
        top_p=_column([p.top_p for p in params], np.float32),
        min_p=_column([p.min_p for p in params], np.float32),
        seed=_column([p.seed for p in params], np.int64),
        choice=_column([sequence.choice for sequence, _ in rows], np.int64),
        index=_column([index for _, index in rows], np.int64),
        num_logprobs=most_logprobs(rows),
    )


def _column(values: list[Any], dtype: type[np.number[Any]]) -> Tensor:
    """numpy reads a list several times as fast as torch."""
    return torch.from_numpy(np.array(values, dtype))


def adjusted(columns: SampleBatch, rows: list[tuple[Sequence, int]], vocab_size: int, stream: Stream) -> SampleBatch:
    """With the sparse part: penalties, biases and bans of the rows that have them, on the device.

    Masks of grammars take a while: a device computes the forward meanwhile.
    """
    if not any(sequence.request.adjusts_logits for sequence, _ in rows):
        return columns
    parts = {
        "bias": _triple([_bias(sequence, index) for sequence, index in rows]),
        "allowed": _allowed(rows, vocab_size),
        "repetition": _triple([_repetition(sequence) for sequence, _ in rows]),
        "frequency": _triple([_frequency(sequence) for sequence, _ in rows]),
    }
    present = {name: tensors for name, tensors in parts.items() if tensors is not None}
    if not present:
        return columns
    moved = iter(stream.upload([tensor for tensors in present.values() for tensor in tensors]))
    changes: dict[str, Any] = {name: tuple(islice(moved, len(tensors))) for name, tensors in present.items()}
    return replace(columns, **changes)


def is_plain(batch: SampleBatch) -> bool:
    """Whether ids are all that is asked for, and the dense part says how."""
    sparse = (batch.bias, batch.allowed, batch.repetition, batch.frequency)
    return batch.num_logprobs < 0 and all(part is None for part in sparse)


def dense_part(batch: SampleBatch) -> list[Tensor]:
    """The columns, each [R]; with_dense_part takes them in this order."""
    return [getattr(batch, name) for name in DENSE]


def with_dense_part(batch: SampleBatch, columns: list[Tensor]) -> SampleBatch:
    changes: dict[str, Any] = dict(zip(DENSE, columns, strict=True))
    return replace(batch, **changes)


def most_logprobs(rows: list[tuple[Sequence, int]]) -> int:
    """See SampleBatch.num_logprobs."""
    return max(_num_logprobs(sequence) for sequence, _ in rows)


def _num_logprobs(sequence: Sequence) -> int:
    wanted = sequence.request.params.logprobs
    if wanted is None:
        return 0 if sequence.request.is_ranked else -1
    return wanted


def _triple(entries: list[Entries | None]) -> Triple | None:
    """COO (row, token, value) of the rows that have entries; None if no row has."""
    present = [(row, entry) for row, entry in enumerate(entries) if entry is not None]
    if not present:
        return None
    rows = np.concatenate([np.full(len(tokens), row, np.int64) for row, (tokens, _) in present])
    tokens = np.concatenate([tokens for _, (tokens, _) in present])
    values = np.concatenate([values for _, (_, values) in present])
    return torch.from_numpy(rows), torch.from_numpy(tokens), torch.from_numpy(values)


def _bias(sequence: Sequence, index: int) -> Entries | None:
    """logit_bias, and what may not come now: stop ids below min_tokens, the last token of a bad word.

    One entry a token: a banned one stays banned whatever its bias.
    """
    params = sequence.request.params
    if not (params.logit_bias or params.bad_words or index < params.min_tokens):
        return None
    values = dict(params.logit_bias)
    if index < params.min_tokens:
        values.update(zip(params.stop_token_ids, repeat(BANNED)))
    values.update(zip(_bad_words(sequence), repeat(BANNED)))
    if not values:
        return None
    return np.array(list(values), np.int64), np.array(list(values.values()), np.float32)


def _bad_words(sequence: Sequence) -> Iterator[int]:
    """The token that would complete a bad word the output has begun (at once for a word of one token)."""
    for word in sequence.request.params.bad_words:
        begun = len(word) - 1
        if begun <= sequence.num_output and tuple(sequence.tokens[len(sequence.tokens) - begun :]) == word[:-1]:
            yield word[-1]


def _allowed(rows: list[tuple[Sequence, int]], vocab_size: int) -> tuple[Tensor, Tensor] | None:
    """Rows that allowed_token_ids or a grammar restrict."""
    restricted = [row for row, (sequence, _) in enumerate(rows) if _is_restricted(sequence)]
    if not restricted:
        return None
    mask = np.stack([_row_mask(rows[row][0], vocab_size) for row in restricted])
    return torch.tensor(restricted, dtype=torch.int64), torch.from_numpy(mask)


def _is_restricted(sequence: Sequence) -> bool:
    return bool(sequence.request.params.allowed_token_ids) or sequence.matcher is not None


def _row_mask(sequence: Sequence, vocab_size: int) -> NDArray[np.bool_]:
    """[V]: True for tokens that may come next."""
    mask = np.ones(vocab_size, np.bool_) if sequence.matcher is None else sequence.matcher.mask()
    allowed = sequence.request.params.allowed_token_ids
    if allowed:
        named = np.zeros(vocab_size, np.bool_)
        named[list(allowed)] = True
        mask &= named
    return mask


def _repetition(sequence: Sequence) -> Entries | None:
    """Every distinct token of prompt and output."""
    penalty = sequence.request.params.repetition_penalty
    if penalty == 1:
        return None
    tokens = np.array(sequence.seen, np.int64)
    return tokens, np.full(len(tokens), penalty, np.float32)


def _frequency(sequence: Sequence) -> Entries | None:
    """presence + frequency * count, of output tokens alone."""
    params = sequence.request.params
    if not params.presence_penalty and not params.frequency_penalty:
        return None
    counts = [(token, count) for token, count in sequence.counts.items() if count]
    amounts = [params.presence_penalty + params.frequency_penalty * count for _, count in counts]
    return np.array([token for token, _ in counts], np.int64), np.array(amounts, np.float32)


def sampled_tokens(rows: list[tuple[Sequence, int]], sampled: Sampled) -> list[SampledToken]:
    """One token a row, with as many log-probabilities as its request asked for."""
    ids, finite = sampled.ids.tolist(), sampled.finite.tolist()
    if sampled.logprobs is None:
        return [SampledToken(token, ok) for token, ok in zip(ids, finite, strict=True)]
    logprobs = sampled.logprobs.tolist()
    top_ids = sampled.top_ids.tolist() if sampled.top_ids is not None else [[]] * len(ids)
    top_logprobs = sampled.top_logprobs.tolist() if sampled.top_logprobs is not None else [[]] * len(ids)
    tokens = []
    for row, (sequence, _) in enumerate(rows):
        wanted = _num_logprobs(sequence)
        top = tuple(zip(top_ids[row][:wanted], top_logprobs[row][:wanted], strict=True)) if wanted > 0 else ()
        logprob = TokenLogprob(ids[row], logprobs[row], top) if wanted >= 0 else None
        tokens.append(SampledToken(ids[row], finite[row], logprob))
    return tokens


def prompt_batch(num_rows: int, num_top: int, device: torch.device) -> SampleBatch:
    """Greedy rows: their `top` lists are what prompt logprobs report."""
    zeros, off = torch.zeros(num_rows, device=device), torch.zeros(num_rows, dtype=torch.int64, device=device)
    return SampleBatch(zeros, off.int(), zeros + 1, zeros, off, off, off, num_logprobs=num_top)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Log-probabilities of prompt tokens, on their way to the host."""

    targets: list[int]  # [N]
    chosen: Tensor  # [N] f32: of the targets
    top_ids: Tensor | None  # [N, k] i64
    top_logprobs: Tensor | None  # [N, k] f32


def prompt_logprobs(scored: ScoredPrompt) -> list[TokenLogprob]:
    """One entry a target."""
    chosen = scored.chosen.tolist()
    if scored.top_ids is None or scored.top_logprobs is None:
        return [TokenLogprob(token, value) for token, value in zip(scored.targets, chosen, strict=True)]
    return [
        TokenLogprob(token, value, tuple(zip(row_ids, row_values, strict=True)))
        for token, value, row_ids, row_values in zip(
            scored.targets, chosen, scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True
        )
    ]
