"""Native sampling: the tokens of the reference, over random settings; a row alone is a row in company."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from model.batch import SampleBatch
from model.kv_cache import KVCache
from model.kv_cost import SCALE_BYTES, KVGroup, KVLayout
from model.ops.cpu.native import CpuOps
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps
from tests.native_ops import native_library

REFERENCE = ReferenceOps()


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(native_library())


def settings(rows: int, num_logprobs: int, seed: int) -> SampleBatch:
    """Each filter off in half of the rows, a third of the rows greedy."""
    dice = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=dice)]

    return SampleBatch(
        temperature=pick(0, 0.01, 0.7, 1, 1, 2.5),
        top_k=pick(0, 0, 0, 1, 5, 40, 300, 5000).int(),
        top_p=pick(1, 1, 1, 0, 0.1, 0.9, 0.9999),
        min_p=pick(0, 0, 0, 0.01, 0.2, 1),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=dice),
        choice=torch.randint(0, 4, (rows,), generator=dice),
        index=torch.randint(0, 5000, (rows,), generator=dice),
        num_logprobs=num_logprobs,
    )


def logits_of(rows: int, vocabulary: int, seed: int) -> Tensor:
    """Some rows smooth, some full of ties, some with banned tokens."""
    x = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    x[1::3] = x[1::3].round()
    x[2::3, ::2] = -math.inf
    x[2::3, -1] = 1.0
    return x


@pytest.mark.parametrize("vocabulary", [1, 2, 13, 257, 3000, 20_011])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_the_reference(ops: CpuOps, vocabulary: int, seed: int) -> None:
    logits, batch = logits_of(90, vocabulary, seed), settings(90, -1, seed)
    actual, expected = ops.sample(logits.clone(), batch), REFERENCE.sample(logits.clone(), batch)
    assert torch.equal(actual.ids, expected.ids) and torch.equal(actual.finite, expected.finite)
    assert actual.logprobs is None


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 300])
def test_logprobs_are_those_of_the_unchanged_logits(ops: CpuOps, num_logprobs: int) -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(5)) * 4
    rows, tokens = torch.arange(40), logits.argmax(-1)
    batch = dataclasses.replace(
        settings(40, num_logprobs, 3),
        bias=(rows, tokens, torch.full((40,), -math.inf)),
        repetition=(rows, (tokens + 1) % 1000, torch.full((40,), 1.3)),
        frequency=(rows, (tokens + 2) % 1000, torch.full((40,), 0.5)),
        allowed=(torch.tensor([3, 7]), torch.rand(2, 1000, generator=torch.Generator().manual_seed(1)) > 0.5),
    )
    actual, expected = ops.sample(logits.clone(), batch), REFERENCE.sample(logits.clone(), batch)
    assert torch.equal(actual.ids, expected.ids) and not (actual.ids == tokens).any()
    torch.testing.assert_close(actual.logprobs, expected.logprobs, atol=2e-6, rtol=1e-6)
    if num_logprobs == 0:
        assert actual.top_ids is None and actual.top_logprobs is None
        return
    assert actual.top_ids is not None and expected.top_ids is not None
    assert torch.equal(actual.top_ids, expected.top_ids)
    torch.testing.assert_close(actual.top_logprobs, expected.top_logprobs, atol=2e-6, rtol=1e-6)


def test_a_row_alone_is_a_row_in_company(ops: CpuOps) -> None:
    logits, batch = logits_of(30, 2000, 9), settings(30, 3, 9)
    whole = ops.sample(logits.clone(), batch)
    assert whole.logprobs is not None and whole.top_logprobs is not None
    columns = [field.name for field in dataclasses.fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
    for row in range(30):
        own = dataclasses.replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in columns})
        alone = ops.sample(logits[row : row + 1].clone(), own)
        assert alone.logprobs is not None and alone.top_logprobs is not None
        assert torch.equal(alone.ids[0], whole.ids[row]) and torch.equal(alone.logprobs[0], whole.logprobs[row])
        assert torch.equal(alone.top_logprobs[0], whole.top_logprobs[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("banned", [False, True])
def test_a_row_that_is_not_finite_is_told_apart(ops: CpuOps, bad: float, banned: bool) -> None:
    """Also where a ban covers what is wrong; the rows beside it keep their tokens."""
    logits, batch = logits_of(6, 77, 4), settings(6, 2, 4)
    if banned:
        one = torch.tensor([3])
        batch = dataclasses.replace(batch, bias=(one, one, torch.tensor([-math.inf])))
    clean = ops.sample(logits.clone(), batch)
    logits[3, 3 if bad != -math.inf else slice(None)] = bad
    spoilt = ops.sample(logits.clone(), batch)
    others = torch.arange(6) != 3
    assert torch.equal(spoilt.finite, others) and torch.equal(spoilt.ids[others], clean.ids[others])
    assert 0 <= int(spoilt.ids[3]) < 77


@pytest.mark.parametrize("place", [0, 5, 8, 31, 32, 40])
def test_the_lowest_of_equal_bests_is_taken(ops: CpuOps, place: int) -> None:
    logits = torch.zeros(1, 41)
    logits[0, place:] = 2.0
    batch = dataclasses.replace(settings(1, -1, 0), temperature=torch.zeros(1))
    assert ops.sample(logits, batch).ids.item() == place


def test_drawn_tokens_follow_the_distribution(ops: CpuOps) -> None:
    rows, logits = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0])
    zeros, off = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    batch = SampleBatch(zeros + 1, off.int(), zeros + 1, zeros, off + 7, off, torch.arange(rows), num_logprobs=-1)
    counts = ops.sample(logits.repeat(rows, 1), batch).ids.bincount(minlength=4) / rows
    torch.testing.assert_close(counts, logits.softmax(0), atol=0.015, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pages_are_copied_whole(ops: CpuOps, dtype: str) -> None:
    """Scales of a quantised cache included, in one layer of three."""
    group = KVGroup((0, 1, 2), None, 2, 8, dtype, SCALE_BYTES.get(dtype, 0))
    pools = [KVCache(KVLayout(4, (group,)), (9,), "cpu") for _ in range(2)]
    content = torch.randint(0, 100, pools[0].storages[0].shape, generator=torch.Generator().manual_seed(0))
    backends: tuple[Ops, Ops] = (ops, REFERENCE)
    for backend, pool in zip(backends, pools, strict=True):
        pool.storages[0].copy_(content)
        backend.copy_pages(pool.layer(1), torch.tensor([1, 1, 7]), torch.tensor([2, 8, 3]))
    assert torch.equal(pools[0].storages[0], pools[1].storages[0])
    assert not torch.equal(pools[0].storages[0], content.to(pools[0].storages[0].dtype))
