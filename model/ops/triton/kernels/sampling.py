"""Device code of sampling: a summary of each row, and one random draw a row.

Knows no requests. Scaled logits are at most 0, so the bits of their magnitude, read as an integer, are a key that rises
from the best token to the worst; every filter keeps the keys below a threshold and the first few ids of those at it.
Sums are fp64 in a fixed order, so that a row's token does not depend on the rows beside it.
Legend: R rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORST = tl.constexpr(0x7F800000)  # the key of -inf
BELOW_ONE = tl.constexpr(1 - 2.0**-53)


@triton.jit
def summary_kernel(logits, tops, sums, places, V, C, BLOCK: tl.constexpr):
    """Program (row, chunk): largest logit (NaN if one is NaN or +inf), sum of exp beside it, its lowest id."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    at = row * C + chunk
    tl.store(tops + at, tl.where(broken > 0, float("nan"), top))
    tl.store(sums + at, tl.sum(tl.exp(x - shift), 0))
    tl.store(places + at, tl.min(tl.where(x == top, token, V), 0))


@triton.jit
def gather_kernel(tops, sums, places, best, top, log_sum, finite, C, CHUNKS: tl.constexpr):
    """Program: one row of its chunks. log_sum: of exp(logits - top)."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    present = chunk < C
    parts = tl.load(tops + row * C + chunk, mask=present, other=float("-inf"))
    broken = tl.max((parts != parts).to(tl.int32), 0)
    most = tl.max(tl.where(parts == parts, parts, float("-inf")), 0)
    fine = (broken == 0) & (most > float("-inf"))
    weights = tl.exp(tl.where(fine, parts - most, 0.0)) * tl.load(sums + row * C + chunk, mask=present, other=0)
    place = tl.load(places + row * C + chunk, mask=present & (parts == most), other=0x7FFFFFFF)
    tl.store(best + row, tl.where(fine, tl.min(place, 0), 0).to(tl.int64))
    tl.store(top + row, most)
    tl.store(log_sum + row, tl.log(tl.sum(weights, 0)))
    tl.store(finite + row, fine.to(tl.int8))


@triton.jit
def uniform(seed, choice, index):
    """One f64 in (0, 1): the first word of Philox4x32-10, as model/ops/philox.py has it."""
    zero = (index * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, index.to(tl.uint32), choice.to(tl.uint32), zero, zero)
    return (word.to(tl.float64) + 0.5) / 4294967296.0


@triton.jit
def keys_of(logits, start, V, top, temperature, BLOCK: tl.constexpr):
    """A block of the row: token ids, keys, weights exp(scaled) in f64; behind the end key > WORST and weight 0."""
    token = start + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < V, other=float("-inf"))
    scaled = tl.div_rn(x - top, tl.zeros_like(x) + temperature)
    key = tl.where(token < V, tl.abs(scaled).to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return token, key, tl.exp(scaled).to(tl.float64)


@triton.jit
def measure(logits, V, top, temperature, limit, BLOCK: tl.constexpr):
    """Number and weight of the tokens with keys up to limit, the largest of these keys, and the least beyond."""
    count, mass = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    last, beyond = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + 0x7FFFFFFF
    for start in range(0, V, BLOCK):
        _ids, key, weight = keys_of(logits, start, V, top, temperature, BLOCK)
        within = key <= limit
        count += tl.sum(within.to(tl.int32), 0)
        mass += tl.sum(tl.where(within, weight, 0.0), 0)
        last = tl.maximum(last, tl.max(tl.where(within, key, 0), 0))
        beyond = tl.minimum(beyond, tl.min(tl.where(within, 0x7FFFFFFF, key), 0))
    return count, mass, last, beyond


@triton.jit
def threshold(logits, V, top, temperature, most, wanted_count, wanted_mass, BLOCK: tl.constexpr):
    """The least key, up to `most`, whose prefix has wanted_count tokens and wanted_mass; what lies before it."""
    low, high = tl.zeros([], tl.int32), most
    while low < high:  # both are keys that occur, after the first steps
        middle = low + (high - low) // 2
        count, mass, last, beyond = measure(logits, V, top, temperature, middle, BLOCK)
        if (count >= wanted_count) & (mass >= wanted_mass):
            high = last
        else:
            low = tl.minimum(beyond, high)
    count, mass, _, _ = measure(logits, V, top, temperature, low - 1, BLOCK)
    return low, count, mass


@triton.jit
def weight_of(key):
    """exp of the scaled logit that has this key."""
    return tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def amounts_of(logits, start, V, top, temperature, wanted, BLOCK: tl.constexpr, OF_KEY: tl.constexpr):
    """Of a block: 1 for tokens with the key `wanted`, else 0; without OF_KEY the weights. f64."""
    _ids, key, weight = keys_of(logits, start, V, top, temperature, BLOCK)
    if OF_KEY:
        weight = (key == wanted).to(tl.float64)
    return weight


@triton.jit
def passing(logits, V, top, temperature, wanted, point, BLOCK: tl.constexpr, OF_KEY: tl.constexpr):
    """The first id at which the running amount exceeds point (f64); if none does for rounding, the last that counts.

    Inside its block by halving and not by a scan: triton#3017 has wrong results of kernels that scan and sum. The same
    tree adds every prefix, so that prefixes never fall, and that of the whole block is its sum bit for bit.
    """
    at, held = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    for start in range(0, V, BLOCK):
        here = tl.sum(amounts_of(logits, start, V, top, temperature, wanted, BLOCK, OF_KEY), 0)
        if (here > 0) & (point >= held):
            at, point, held = start, point - held, here
    amounts, place = amounts_of(logits, at, V, top, temperature, wanted, BLOCK, OF_KEY), tl.arange(0, BLOCK)
    goal = tl.minimum(point, held * BELOW_ONE)
    low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + (BLOCK - 1)
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(place <= middle, amounts, 0.0), 0) > goal:
            high = middle
        else:
            low = middle + 1
    return at + low


@triton.jit
def last_key_of(least, most):
    """The last key, up to `most`, whose weight is at least this."""
    low, high = tl.zeros([], tl.int32), most
    while low < high:
        middle = low + (high - low + 1) // 2
        if weight_of(middle) >= least:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def draw_ranked(logits, V, top, temperature, top_k, top_p, min_p, point, BLOCK: tl.constexpr):
    """Among the prefix of the ranking that the filters keep, the token at which the running weight passes point.

    The prefix: keys below edge, and the first `ties` ids of those at it.
    """
    edge, ties = tl.zeros([], tl.int32) + WORST, tl.zeros([], tl.int32) + V
    _, total, _, _ = measure(logits, V, top, temperature, edge, BLOCK)
    if (top_k > 0) & (top_k < V):
        edge, before, lighter = threshold(logits, V, top, temperature, edge, top_k, 0.0, BLOCK)
        ties = top_k - before
        total = lighter + ties * weight_of(edge)
    if min_p > 0:
        heavy = last_key_of(min_p, edge)
        if heavy < edge:
            ties, total, edge, _ = measure(logits, V, top, temperature, heavy, BLOCK)
    if top_p < 1:
        goal = top_p.to(tl.float64) * total
        nearer, _, lighter = threshold(logits, V, top, temperature, edge, 1, goal, BLOCK)
        needed = tl.maximum(tl.ceil((goal - lighter) / weight_of(nearer)).to(tl.int32), 1)
        ties = tl.where(nearer == edge, tl.minimum(ties, needed), needed)
        edge = nearer
        total = tl.minimum(total, lighter + ties * weight_of(edge))
    target = point * total
    chosen, _, lighter = threshold(logits, V, top, temperature, edge, 1, target, BLOCK)
    rank = tl.maximum(tl.floor((target - lighter) / weight_of(chosen)).to(tl.int32), 0)
    return passing(logits, V, top, temperature, chosen, rank.to(tl.float64), BLOCK, True)


@triton.jit
def draw_free(logits, V, top, temperature, point, BLOCK: tl.constexpr):
    """The first id at which the running weight passes point."""
    _count, total, _last, _beyond = measure(logits, V, top, temperature, WORST, BLOCK)
    return passing(logits, V, top, temperature, 0, point * total, BLOCK, False)


@triton.jit
def draw_kernel(
    logits, best, top, finite, temperature, top_k, top_p, min_p, seed, choice, index, ids, V, BLOCK: tl.constexpr
):
    """Program: one row. Temperature 0 and broken rows take `best`."""
    row = tl.program_id(0)
    token = tl.load(best + row).to(tl.int32)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(finite + row) > 0):
        point = uniform(tl.load(seed + row), tl.load(choice + row), tl.load(index + row))
        k, p, least, most = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(top + row)
        here = logits + row.to(tl.int64) * V
        if (k > 0) | (p < 1) | (least > 0):
            token = draw_ranked(here, V, most, heat, k, p, least, point, BLOCK)
        else:
            token = draw_free(here, V, most, heat, point, BLOCK)
    tl.store(ids + row, token.to(tl.int64))
