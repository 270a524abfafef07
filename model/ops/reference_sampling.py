"""From logits to tokens: adjustments, filters and one random draw a row.

Knows no requests. Every filter keeps a prefix of the row's ranking (best first, ties to the lowest id), and every sum
runs in index order in float64, so a row's token does not depend on the rows beside it.
Legend: R rows, V vocabulary, M leading ranks looked at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.ops.philox import uniform

FIRST_RANKS = 256
"""A row whose filters keep more than this is ranked whole."""


def sample(logits: Tensor, batch: SampleBatch) -> Sampled:
    """logits [R, V] f32 (overwritten) -> Sampled; see model/batch.py."""
    finite = logits.amax(-1).isfinite()  # amax passes NaN on
    logits = logits.masked_fill_(~finite.unsqueeze(1), 0.0)
    log_softmax = logits.log_softmax(-1) if batch.num_logprobs >= 0 else None
    logits = adjust(logits, batch)
    finite &= logits.amax(-1).isfinite()  # a penalty may overflow, and a ban may leave nothing
    ids = logits.argmax(-1)
    drawn = ((batch.temperature > 0) & finite).nonzero().squeeze(1)
    if len(drawn):
        ids.index_copy_(0, drawn, _draw(logits.index_select(0, drawn), _rows_of(batch, drawn)))
    if log_softmax is None:
        return Sampled(ids, finite, None, None, None)
    chosen = log_softmax.gather(1, ids.unsqueeze(1)).squeeze(1)
    if batch.num_logprobs == 0:
        return Sampled(ids, finite, chosen, None, None)
    top, top_ids = ranked(log_softmax, batch.num_logprobs)
    return Sampled(ids, finite, chosen, top_ids, top)


def _rows_of(batch: SampleBatch, rows: Tensor) -> SampleBatch:
    """The per-row settings of some rows; what is already applied is left out."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "index")
    return SampleBatch(**{name: getattr(batch, name).index_select(0, rows) for name in names}, num_logprobs=-1)


def adjust(logits: Tensor, batch: SampleBatch) -> Tensor:
    """Penalties first, as they look at the model's own logits; then biases and bans. A (row, token) occurs once."""
    if batch.repetition is not None:
        rows, tokens, penalty = batch.repetition
        value = logits[rows, tokens]
        logits[rows, tokens] = torch.where(value > 0, value / penalty, value * penalty)
    if batch.frequency is not None:
        rows, tokens, amount = batch.frequency
        logits[rows, tokens] -= amount
    if batch.bias is not None:
        rows, tokens, bias = batch.bias
        logits[rows, tokens] += bias
    if batch.allowed is not None:
        rows, mask = batch.allowed
        logits[rows] = logits[rows].masked_fill_(~mask, -math.inf)
    return logits


def ranked(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The count largest values of each row of x [R, V] and their indices, best first, ties to the lowest index.

    topk leaves ties open, inside its answer (sorted here) and at its end (rows where that shows are sorted whole).
    Which of several -inf come last stays open.
    """
    count = min(count, x.shape[1])
    values, ids = x.topk(count, dim=-1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    last = values[:, -1:]
    cut_ties = ((x >= last).sum(-1) > count) & (last.squeeze(1) > -math.inf)
    rows = cut_ties.nonzero().squeeze(1)
    if len(rows):
        whole, order = x.index_select(0, rows).sort(dim=-1, descending=True, stable=True)
        values.index_copy_(0, rows, whole[:, :count])
        ids.index_copy_(0, rows, order[:, :count])
    return values, ids


def _draw(logits: Tensor, batch: SampleBatch) -> Tensor:
    """Temperature, then min_p, top_k and top_p, then the inverse of the cumulative sum at the row's random number."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / batch.temperature.unsqueeze(1)
    point = uniform(batch.seed, batch.choice, batch.index)
    ids = torch.empty_like(batch.seed)
    filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    free = (~filtered).nonzero().squeeze(1)
    if len(free):
        ids.index_copy_(0, free, _invert(scaled.index_select(0, free), point.index_select(0, free)))
    left = filtered.nonzero().squeeze(1)
    for count in (FIRST_RANKS, scaled.shape[1]):
        if not len(left):
            break
        rows, u = scaled.index_select(0, left), point.index_select(0, left)
        tokens, done = _draw_ranked(rows, _rows_of(batch, left), u, count)
        ids.index_copy_(0, left[done], tokens[done])
        left = left[~done]
    return ids


def _draw_ranked(scaled: Tensor, batch: SampleBatch, point: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw among the kept prefix of the first count ranks; also which rows have their whole prefix in it."""
    values, ids = ranked(scaled, count)
    kept, whole = _prefix(values, scaled, batch)
    rank = _invert(values.masked_fill(torch.arange(values.shape[1], device=kept.device) >= kept, -math.inf), point)
    return ids.gather(1, rank.unsqueeze(1)).squeeze(1), whole


def _prefix(values: Tensor, scaled: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """How many leading ranks the filters keep [R, 1], given the leading values [R, M]; whether M suffices [R]."""
    count, vocabulary = values.shape[1], scaled.shape[1]
    weights = values.exp()  # the best weighs 1
    kept = torch.where(batch.top_k > 0, batch.top_k.long(), vocabulary).clamp(max=vocabulary)
    above = (weights >= batch.min_p.unsqueeze(1)).sum(-1).clamp(min=1)
    known = (batch.min_p <= 0) | (above < count) | (count == vocabulary)
    kept = torch.where((batch.min_p > 0) & known, torch.minimum(kept, above), kept)
    known &= (kept <= count) | (kept == vocabulary)
    sums = weights.double().cumsum(-1)  # [R, M]
    total = sums.gather(1, kept.clamp(max=count).unsqueeze(1) - 1).squeeze(1)
    everything = scaled.exp().double().cumsum(-1)[:, -1]  # in index order, whatever M is
    total = torch.where(kept == vocabulary, everything, total)
    reached = (sums < (batch.top_p.double() * total).unsqueeze(1)).sum(-1) + 1
    kept = torch.where(batch.top_p < 1, torch.minimum(kept, reached), kept)
    return kept.unsqueeze(1), known & (kept <= count)


def _invert(scaled: Tensor, point: Tensor) -> Tensor:
    """First index at which the running sum of exp(scaled) [R, M] passes point [R] of the whole."""
    sums = scaled.exp().double().cumsum(-1)
    return torch.searchsorted(sums, (point * sums[:, -1]).unsqueeze(1), right=True).squeeze(1)
