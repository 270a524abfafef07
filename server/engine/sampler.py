"""Requests to SampleBatch, Sampled to tokens: what each row's parameters mean for its logits.

Knows no model and no schedule. A row depends on its own sequence alone: its parameters, its history, its output index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import SampleBatch, Sampled
from server.engine.messages import TokenLogprob
from server.engine.plan import SampledToken
from server.engine.request import Sequence

Triple = tuple[Tensor, Tensor, Tensor]
Entries = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens, values of one row
BANNED = -math.inf


def sample_batch(rows: list[tuple[Sequence, int]], vocab_size: int, device: torch.device) -> SampleBatch:
    """One entry a row: (sequence, index of the output token to sample)."""
    params = [sequence.request.params for sequence, _ in rows]

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return SampleBatch(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column([p.seed for p in params], torch.int64),
        choice=column([sequence.choice for sequence, _ in rows], torch.int64),
        index=column([index for _, index in rows], torch.int64),
        num_logprobs=max(_num_logprobs(sequence) for sequence, _ in rows),
        bias=_triple([_bias(sequence, index) for sequence, index in rows], device),
        allowed=_allowed(rows, vocab_size, device),
        repetition=_triple([_repetition(sequence) for sequence, _ in rows], device),
        frequency=_triple([_frequency(sequence) for sequence, _ in rows], device),
    )


def _num_logprobs(sequence: Sequence) -> int:
    wanted = sequence.request.params.logprobs
    if wanted is None:
        return 0 if sequence.request.is_ranked else -1
    return wanted


def _triple(entries: list[Entries | None], device: torch.device) -> Triple | None:
    """COO (row, token, value) of the rows that have entries; None if no row has."""
    present = [(row, entry) for row, entry in enumerate(entries) if entry is not None]
    if not present:
        return None
    rows = np.concatenate([np.full(len(tokens), row, np.int64) for row, (tokens, _) in present])
    tokens = np.concatenate([tokens for _, (tokens, _) in present])
    values = np.concatenate([values for _, (_, values) in present])
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device), torch.from_numpy(values).to(device)


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


def _allowed(rows: list[tuple[Sequence, int]], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Rows that allowed_token_ids or a grammar restrict. On a GPU this runs while the forward does."""
    restricted = [row for row, (sequence, _) in enumerate(rows) if _is_restricted(sequence)]
    if not restricted:
        return None
    mask = np.stack([_row_mask(rows[row][0], vocab_size) for row in restricted])
    return torch.tensor(restricted, dtype=torch.int64).to(device), torch.from_numpy(mask).to(device)


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


def prompt_logprobs(logprobs: Tensor, targets: list[int], best: Sampled, num_top: int) -> list[TokenLogprob]:
    """logprobs [N, V] f32 of N prompt rows, targets: the N tokens that follow, best: the sampler's view of the rows."""
    column = torch.tensor(targets, dtype=torch.int64, device=logprobs.device)[:, None]
    chosen = logprobs.gather(1, column)[:, 0].tolist()
    if num_top == 0 or best.top_ids is None or best.top_logprobs is None:
        return [TokenLogprob(token, value) for token, value in zip(targets, chosen, strict=True)]
    ids, values = best.top_ids[:, :num_top].tolist(), best.top_logprobs[:, :num_top].tolist()
    return [
        TokenLogprob(token, value, tuple(zip(row_ids, row_values, strict=True)))
        for token, value, row_ids, row_values in zip(targets, chosen, ids, values, strict=True)
    ]
