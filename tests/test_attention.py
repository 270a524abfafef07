"""Paged attention against a float64 softmax written out, and against itself in every cut of the work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.ops.interface import AttentionTables, LayerKV
from model.ops.reference_attention import paged_attention


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, past: int = 0) -> Tensor:
    """q [L, Hq, d], k and v [S, Hkv, d] -> [L, Hq * d], one query and head at a time in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        end = past + row + 1
        first = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            keys, values = k[first:end, head // group].double(), v[first:end, head // group].double()
            out[row, head] = (keys @ q[row, head].double() * scale).softmax(0) @ values
    return out.flatten(1)


@dataclass
class Paged:
    """Keys and values of sequences, scattered over the pages of a poisoned pool."""

    kv: LayerKV
    table: Tensor

    @classmethod
    def of(cls, sequences: list[tuple[Tensor, Tensor]], page_size: int) -> Paged:
        _, heads, dim = sequences[0][0].shape
        width = max(-(-k.shape[0] // page_size) for k, _ in sequences)
        total = 1 + width * len(sequences)
        kv = LayerKV(*torch.full((2, total, heads, page_size, dim), math.nan, dtype=sequences[0][0].dtype).unbind(0))
        order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(0)) + 1
        table = torch.zeros(len(sequences), width, dtype=torch.int32)
        for row, (k, v) in enumerate(sequences):
            for page in range(-(-k.shape[0] // page_size)):
                table[row, page] = order[row * width + page]
                span = slice(page * page_size, (page + 1) * page_size)
                for cache, source in ((kv.k, k), (kv.v, v)):
                    part = source[span].transpose(0, 1)
                    cache[order[row * width + page], :, : part.shape[1]] = part
        return cls(kv, table)

    def attend(self, q: list[Tensor], lens: list[int], scale: float, window: int | None = None) -> list[Tensor]:
        """q[b]: the last queries of sequence b, whose cache holds lens[b] tokens."""
        counts = [len(rows) for rows in q]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tables = AttentionTables(self.table, torch.tensor(lens, dtype=torch.int32), starts, max(counts), max(lens))
        return list(paged_attention(torch.cat(q), self.kv, tables, scale, window).split(counts))  # type: ignore[no-untyped-call]


def random_sequence(length: int, heads: int, kv_heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(length, count, dim, generator=generator) for count in shapes)
    return q, k, v


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 8), (8, 1, 20)])
def test_against_float64(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    q, k, v = random_sequence(150, heads, kv_heads, dim, seed=0)
    (out,) = Paged.of([(k, v)], page_size=16).attend([q], [150], dim**-0.5, window)
    torch.testing.assert_close(out.double(), naive(q, k, v, dim**-0.5, window), rtol=0, atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 4, 16, 24, 64, 256])
def test_page_size_changes_no_bit(page_size: int) -> None:
    q, k, v = random_sequence(140, 6, 2, 16, seed=1)
    (out,) = Paged.of([(k, v)], page_size).attend([q], [140], 0.25)
    assert torch.equal(out, Paged.of([(k, v)], 4).attend([q], [140], 0.25)[0])


@pytest.mark.parametrize("window", [None, 3, 70])
def test_chunks_at_every_boundary_change_no_bit(window: int | None) -> None:
    length = 135
    q, k, v = random_sequence(length, 9, 3, 16, seed=2)
    paged = Paged.of([(k, v)], 4)
    (whole,) = paged.attend([q], [length], 0.25, window)
    for cut in range(1, length):
        (head,) = paged.attend([q[:cut]], [cut], 0.25, window)
        assert torch.equal(head, whole[:cut])
        (tail,) = paged.attend([q[cut:]], [length], 0.25, window)
        assert torch.equal(tail, whole[cut:])
    for position in range(length):
        (row,) = paged.attend([q[position : position + 1]], [position + 1], 0.25, window)
        assert torch.equal(row, whole[position : position + 1])


@pytest.mark.parametrize("window", [None, 10])
def test_company_changes_no_bit(window: int | None) -> None:
    lens, asked = [1, 70, 64, 65, 200, 3], [1, 1, 64, 5, 1, 2]
    sequences = [random_sequence(length, 6, 2, 16, seed=length) for length in lens]
    paged = Paged.of([(k, v) for _, k, v in sequences], 4)
    queries = [q[-count:] for (q, _, _), count in zip(sequences, asked, strict=True)]
    together = paged.attend(queries, lens, 0.25, window)
    for (_, k, v), query, length, out in zip(sequences, queries, lens, together, strict=True):
        assert torch.equal(Paged.of([(k, v)], 4).attend([query], [length], 0.25, window)[0], out)
    decoded = paged.attend([q[-1:] for q, _, _ in sequences], lens, 0.25, window)
    for row, out in zip(decoded, together, strict=True):
        assert torch.equal(row[-1], out[-1])


def test_the_worked_example() -> None:
    eye = torch.eye(2).view(2, 1, 2)
    paged = Paged.of([(eye, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2))], 4)
    (causal,) = paged.attend([eye], [2], 2**-0.5)
    assert causal[0].tolist() == [1.0, 2.0]
    torch.testing.assert_close(causal[1], torch.tensor([2.3395, 3.3395]), rtol=0, atol=5e-5)
    (first,) = paged.attend([eye[:1]], [2], 2**-0.5)  # the first query, asked from the last position: sees both
    torch.testing.assert_close(first[0], torch.tensor([1.6605, 2.6605]), rtol=0, atol=5e-5)


def test_softmax_of_two_one_zero_and_of_huge_scores() -> None:
    keys = torch.tensor([2.0, 1.0, 0.0]).view(3, 1, 1).expand(3, 1, 3).contiguous()
    paged = Paged.of([(keys, torch.eye(3).view(3, 1, 3))], 4)
    query = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3)
    (weights,) = paged.attend([query], [3], 1.0)
    torch.testing.assert_close(weights[0], torch.tensor([0.665, 0.245, 0.090]), rtol=0, atol=5e-4)
    (huge,) = paged.attend([query * 1e4], [3], 1.0)
    assert huge[0].tolist() == [1.0, 0.0, 0.0]


def test_rows_that_see_nothing_are_zero() -> None:
    """An empty sequence, and padding rows behind the last sequence."""
    q, k, v = random_sequence(4, 2, 1, 8, seed=0)
    paged = Paged.of([(k, v), (k, v)], 4)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    tables = AttentionTables(paged.table, torch.tensor([0, 4], dtype=torch.int32), starts, 1, 4)
    out = paged_attention(q, paged.kv, tables, 1.0, None)
    assert out[0].eq(0).all() and out[2:].eq(0).all()
    assert out[1].isfinite().all() and out[1].ne(0).any()


def test_kv_heads_repeat_interleaved() -> None:
    q, k, v = random_sequence(1, 6, 2, 8, seed=0)
    (out,) = Paged.of([(k, v)], 4).attend([q], [1], 1.0)
    assert torch.equal(out.view(6, 8), v[0].repeat_interleave(3, dim=0))


def test_dead_pages_behind_the_window_are_not_read() -> None:
    q, k, v = random_sequence(100, 2, 1, 8, seed=0)
    paged = Paged.of([(k, v)], 4)
    (before,) = paged.attend([q[-1:]], [100], 1.0, 9)
    paged.table[0, :22] = 0  # scratch, full of NaN
    assert torch.equal(paged.attend([q[-1:]], [100], 1.0, 9)[0], before)


def test_the_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    pages = torch.randn(2, 2, 1, 4, 4, dtype=torch.float64, generator=generator, requires_grad=True)  # k and v
    tables = AttentionTables(
        torch.tensor([[1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3]), 3, 3
    )

    def attention(q: Tensor, pages: Tensor) -> Tensor:
        return paged_attention(q, LayerKV(pages[0], pages[1]), tables, 0.5, None)

    assert torch.autograd.gradcheck(attention, (q, pages))
