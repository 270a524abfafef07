"""The reference operations: a row depends on itself alone, and the sampler chooses what its definition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.ops.interface import LayerKV
from model.ops.philox import philox, uniform
from model.ops.reference import ReferenceOps
from tests.native_ops import random as randn
from tests.sampling_rows import INF, mixed, pick, settings

OPS = ReferenceOps()
ROWS = [*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 200, 255, 256, 300]


# ---- a row depends on itself alone ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (48, 96), (36, 100), (7, 33), (2050, 31)])
def test_linear_rows_do_not_depend_on_their_number(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(300, inputs).to(dtype), randn(outputs, inputs, seed=1).to(dtype), randn(outputs).to(dtype)
    for packed in (OPS.pack_linear(weight, None), OPS.pack_linear(weight, bias)):
        whole = OPS.linear(x, packed)
        wide = OPS.linear(x, packed, torch.float32)
        assert (whole.dtype, wide.dtype) == (dtype, torch.float32)
        for rows in ROWS:
            assert torch.equal(OPS.linear(x[:rows], packed), whole[:rows]), rows
            assert torch.equal(OPS.linear(x[300 - rows :], packed, torch.float32), wide[300 - rows :]), rows


def test_linear_is_a_matrix_product() -> None:
    x, weight, bias = randn(5, 64), randn(33, 64, seed=1), randn(33, seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(OPS.linear(x, OPS.pack_linear(weight, bias)).double(), exact, rtol=0, atol=1e-5)
    halves = OPS.pack_linear(weight.bfloat16(), bias.bfloat16())
    exact = x.bfloat16().double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    torch.testing.assert_close(OPS.linear(x.bfloat16(), halves, torch.float32).double(), exact, rtol=0, atol=1e-5)


def test_bad_rows_stay_apart() -> None:
    x = randn(9, 64)
    packed = OPS.pack_linear(randn(32, 64, seed=1), None)
    clean = OPS.linear(x, packed)
    x[4] = torch.nan
    dirty = OPS.linear(x, packed)
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(dirty[kept], clean[kept]) and dirty[4].isnan().all()


@pytest.mark.parametrize("width", [6, 33, 48, 576, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_activation_rows_do_not_depend_on_their_number(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(300, width).to(dtype), randn(300, width, seed=1).to(dtype), randn(width).to(dtype)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    gated = OPS.silu_mul(torch.cat((x, residual), 1))
    for rows in ROWS:
        part = slice(300 - rows, 300)
        again, again_total = OPS.add_rms_norm(x[part], residual[part], weight, 1e-5)
        assert torch.equal(again, normed[part]) and torch.equal(again_total, total[part])
        assert torch.equal(OPS.silu_mul(torch.cat((x[part], residual[part]), 1)), gated[part])


def test_norm_and_activation_by_their_formulas() -> None:
    x, residual, weight = randn(3, 40), randn(3, 40, seed=1), randn(40, seed=2)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    s = x.double() + residual.double()
    expected = s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(total.double(), s, rtol=0, atol=1e-6)
    assert OPS.add_rms_norm(x, None, weight, 1e-5)[1] is x
    expected = torch.nn.functional.silu(x.double()) * residual.double()
    torch.testing.assert_close(OPS.silu_mul(torch.cat((x, residual), 1)).double(), expected, rtol=0, atol=2e-6)
    assert OPS.silu_mul(torch.tensor([[-200.0, 1.0]])).item() == 0


def test_values_are_written_as_they_are_and_keys_turned() -> None:
    kv = LayerKV(*torch.zeros(2, 3, 2, 4, 8).unbind(0))
    qkv = randn(2, (4 + 2 * 2) * 8)
    table = torch.cat((torch.zeros(9, 4), torch.ones(9, 4)), 1)  # a quarter turn: (a, b) -> (-b, a)
    q = OPS.rope_write(qkv, None, None, 1e-5, table, torch.tensor([3, 4]), torch.tensor([7, 8]), kv)
    heads = qkv.view(2, 8, 8)
    assert torch.equal(q, torch.cat((-heads[:, :4, 4:], heads[:, :4, :4]), -1))
    for row, (page, offset) in enumerate([(1, 3), (2, 0)]):
        assert torch.equal(kv.v[page, :, offset], heads[row, 6:])
        assert torch.equal(kv.k[page, :, offset], torch.cat((-heads[row, 4:6, 4:], heads[row, 4:6, :4]), -1))
    assert kv.v.count_nonzero() == 2 * 2 * 8


def test_copy_pages() -> None:
    kv = LayerKV(*randn(2, 4, 2, 4, 8).unbind(0))
    before = kv.k.clone(), kv.v.clone()
    OPS.copy_pages(kv, torch.tensor([1, 2]), torch.tensor([3, 0]))
    assert torch.equal(kv.k[[3, 0, 1, 2]], before[0][[1, 2, 1, 2]])
    assert torch.equal(kv.v[[3, 0, 1, 2]], before[1][[1, 2, 1, 2]])


# ---- random numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([int(word, 16)]) for word in f"{counter} {key}".split())
    assert " ".join(f"{word.item():08x}" for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_uniform_numbers() -> None:
    index = torch.arange(20_000)
    numbers = uniform(torch.full_like(index, -5), torch.zeros_like(index), index)
    assert numbers.min() > 0 and numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.01
    seed, choice = torch.tensor([1, 2, 1, 1 + 2**32, -1]), torch.tensor([0, 0, 1, 0, 0])
    assert len(set(uniform(seed, choice, torch.zeros_like(seed)).tolist())) == 5


# ---- sampling ---------------------------------------------------------------------------------------------


def draws(logits: list[float], count: int = 4000, **fields: Any) -> Tensor:
    """How often each token is drawn, over output indices 0 to count."""
    ids = OPS.sample(torch.tensor(logits).repeat(count, 1), settings(count, index=torch.arange(count), **fields)).ids
    return torch.bincount(ids, minlength=len(logits)) / count


def test_greedy_takes_the_lowest_best_id() -> None:
    for width in (5, 64, 1000, 49152):
        logits = torch.zeros(3, width)
        logits[1, width // 2 :] = 1
        logits[2, -1] = 1
        assert OPS.sample(logits, settings(3, temperature=0.0)).ids.tolist() == [0, width // 2, width - 1]


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -INF, 0.5]
    torch.testing.assert_close(draws(logits), torch.tensor(logits).softmax(0), rtol=0, atol=0.03)
    hot = draws(logits, temperature=2.0)
    torch.testing.assert_close(hot, (torch.tensor(logits) / 2).softmax(0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.3}, [2]),
        ({"top_p": 1e-9}, [2]),
        ({"top_p": 0.65}, [1, 2]),  # probabilities 0.1, 0.3, 0.4, 0.2
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"min_p": 0.6}, [1, 2]),
        ({"min_p": 1.0}, [2]),
        ({"top_k": 3, "top_p": 0.6}, [1, 2]),  # renormalised over the three: 0.44 + 0.33 reach 0.6
        ({"min_p": 0.3, "top_k": 3, "top_p": 0.99}, [1, 2, 3]),
        ({"temperature": 1e-6}, [2]),
    ],
)
def test_filters_keep_exactly(fields: dict[str, Any], kept: list[int]) -> None:
    logits = torch.tensor([0.1, 0.3, 0.4, 0.2]).log().tolist()
    counts = draws(logits, count=600, **fields)
    assert counts.nonzero().flatten().tolist() == kept


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    assert draws([1.0, 0.0, 1.0, 1.0], count=200, top_k=2).nonzero().flatten().tolist() == [0, 2]
    assert draws([0.0] * 1000, count=200, top_k=3).nonzero().flatten().tolist() == [0, 1, 2]
    assert draws([0.0] * 1000, count=5000, top_p=0.5).nonzero().max() == 499


@pytest.mark.parametrize("vocabulary", [97, 5003])
def test_a_row_is_sampled_alike_in_any_company(vocabulary: int) -> None:
    logits, batch = randn(33, vocabulary) * 2, mixed(33, num_logprobs=3)
    whole = OPS.sample(logits.clone(), batch)
    assert whole.logprobs is not None and whole.top_ids is not None and whole.top_logprobs is not None
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    for rows in [[row] for row in range(33)] + [[4, 9], [30, 2, 17], list(range(8, 16)), order.tolist()]:
        index = torch.tensor(rows)
        part = OPS.sample(logits[index], pick(batch, index))
        assert part.logprobs is not None and part.top_ids is not None and part.top_logprobs is not None
        assert torch.equal(part.ids, whole.ids[index])
        assert torch.equal(part.logprobs, whole.logprobs[index])
        assert torch.equal(part.top_ids, whole.top_ids[index])
        assert torch.equal(part.top_logprobs, whole.top_logprobs[index])


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    bias = (torch.tensor([0]), torch.tensor([0]), torch.tensor([50.0]))
    out = OPS.sample(logits.clone(), settings(1, temperature=0.0, num_logprobs=3, bias=bias))
    assert out.ids.tolist() == [0]
    expected = logits.log_softmax(-1)
    assert out.logprobs is not None and out.logprobs.tolist() == expected[:, 0].tolist()
    assert out.top_ids is not None and out.top_ids.tolist() == [[1, 3, 2]]
    assert out.top_logprobs is not None and torch.equal(out.top_logprobs, expected[:, [1, 3, 2]])
    chosen = OPS.sample(logits.clone(), settings(1, temperature=0.0, num_logprobs=0))
    assert chosen.logprobs is not None and chosen.top_ids is None
    assert OPS.sample(logits, settings(1)).logprobs is None


@pytest.mark.parametrize(
    ("fields", "best"),
    [
        ({"bias": ([0, 0], [2, 3], [1.5, -INF])}, 2),
        ({"repetition": ([0, 0], [3, 0], [2.0, 2.0])}, 2),  # 4 / 2 and -1 * 2
        ({"frequency": ([0], [3], [1.5])}, 2),
        ({"allowed": ([0], [[True, True, False, False]])}, 1),
    ],
)
def test_adjustments_touch_their_rows_alone(fields: dict[str, Any], best: int) -> None:
    logits = torch.tensor([[-1.0, 1.0, 3.0, 4.0]]).repeat(2, 1)
    tensors: dict[str, Any] = {name: tuple(torch.tensor(part) for part in parts) for name, parts in fields.items()}
    assert OPS.sample(logits, settings(2, temperature=0.0, **tensors)).ids.tolist() == [best, 3]


def test_repetition_pushes_down_on_both_sides_of_zero() -> None:
    penalty = (torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2.0, 2.0]))
    logits = torch.tensor([[4.0, -1.0, 1.9, -1.9]])
    OPS.sample(logits, settings(1, temperature=0.0, repetition=penalty))
    assert logits.tolist() == [[2.0, -2.0, pytest.approx(1.9), pytest.approx(-1.9)]]


def test_broken_rows_are_reported_and_disturb_nobody() -> None:
    logits = randn(6, 500)
    clean = OPS.sample(logits.clone(), settings(6, seed=torch.arange(6), num_logprobs=2))
    logits[1, 7], logits[2, 499], logits[4] = torch.nan, INF, -INF
    out = OPS.sample(logits, settings(6, seed=torch.arange(6), num_logprobs=2))
    assert out.finite.tolist() == [True, False, False, True, False, True]
    kept = [0, 3, 5]
    assert torch.equal(out.ids[kept], clean.ids[kept])
    assert out.logprobs is not None and clean.logprobs is not None
    assert torch.equal(out.logprobs[kept], clean.logprobs[kept])
    nothing = (torch.tensor([0]), torch.zeros(1, 4, dtype=torch.bool))
    assert OPS.sample(torch.zeros(2, 4), settings(2, allowed=nothing)).finite.tolist() == [False, True]
    overflow = (torch.tensor([0]), torch.tensor([3]), torch.tensor([1e-40]))
    assert OPS.sample(torch.ones(2, 4), settings(2, repetition=overflow)).finite.tolist() == [False, True]
