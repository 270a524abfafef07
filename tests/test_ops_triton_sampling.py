"""Triton sampling in the interpreter: the tokens of the reference sampler, whatever the settings and the company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tests.interpreted_triton  # noqa: F401  (first)
from model.batch import SampleBatch
from model.ops.reference import ReferenceOps
from model.ops.triton.ops import TritonOps
from tests.native_ops import random as randn
from tests.sampling_rows import INF, mixed, pick

OPS, REFERENCE = TritonOps(), ReferenceOps()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, where a GPU says nothing


def compare(logits: Tensor, batch: SampleBatch) -> None:
    ours, theirs = OPS.sample(logits.clone(), batch), REFERENCE.sample(logits.clone(), batch)
    assert torch.equal(ours.finite, theirs.finite)
    kept = theirs.finite
    assert torch.equal(ours.ids[kept], theirs.ids[kept])
    assert ((ours.ids >= 0) & (ours.ids < logits.shape[1])).all()
    if theirs.logprobs is not None and ours.logprobs is not None:
        torch.testing.assert_close(ours.logprobs[kept], theirs.logprobs[kept], rtol=1e-6, atol=2e-6)
    assert (ours.top_ids is None) == (theirs.top_ids is None)
    if theirs.top_ids is not None and ours.top_ids is not None and ours.top_logprobs is not None:
        assert theirs.top_logprobs is not None and torch.equal(ours.top_ids[kept], theirs.top_ids[kept])
        torch.testing.assert_close(ours.top_logprobs[kept], theirs.top_logprobs[kept], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocabulary", [97, 4200])
def test_the_tokens_of_the_reference(vocabulary: int) -> None:
    compare(randn(21, vocabulary) * 2, mixed(21, num_logprobs=3))


def test_ties_go_to_the_lowest_ids() -> None:
    compare((randn(21, 300) * 2).round(), mixed(21, num_logprobs=5))
    compare(torch.zeros(8, 50), mixed(8, num_logprobs=0))


def test_adjustments() -> None:
    rows, tokens = torch.tensor([0, 0, 3, 5]), torch.tensor([1, 7, 2, 2])
    parts: dict[str, Any] = {
        "repetition": (rows, tokens, torch.tensor([1.3, 2.0, 1.1, 1e-40])),
        "frequency": (rows, tokens, torch.tensor([0.5, 0.0, 1.0, 0.2])),
        "bias": (rows, tokens, torch.tensor([3.0, -INF, 100.0, 1.0])),
        "allowed": (torch.tensor([1, 2]), torch.stack((torch.arange(64) % 3 == 0, torch.zeros(64).bool()))),
    }
    compare(randn(12, 64) + 1, mixed(12, num_logprobs=2, **parts))


def test_broken_rows_disturb_nobody() -> None:
    logits = randn(12, 500)
    logits[1, 7], logits[2, 499], logits[4] = torch.nan, INF, -INF
    logits[6, 3:] = -INF
    compare(logits, mixed(12, num_logprobs=1))


def test_a_row_is_sampled_alike_in_any_company() -> None:
    logits, batch = randn(9, 4200) * 2, mixed(9)
    whole = OPS.sample(logits.clone(), batch).ids
    for rows in ([3], [8, 2, 7]):
        assert torch.equal(OPS.sample(logits[rows].clone(), pick(batch, torch.tensor(rows))).ids, whole[rows])


class NoQuestions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on what makes a host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_the_host_is_asked_nothing() -> None:
    index = torch.tensor([0, 2])
    triple = (index, index, torch.tensor([1.5, 2.5]))
    allowed = (index, torch.ones(2, 64, dtype=torch.bool))
    batch = mixed(4, num_logprobs=2, repetition=triple, frequency=triple, bias=triple, allowed=allowed)
    logits = randn(4, 64)
    with NoQuestions():  # type: ignore[no-untyped-call]
        OPS.sample(logits, batch)
    with pytest.raises(AssertionError), NoQuestions():  # type: ignore[no-untyped-call]
        REFERENCE.sample(logits, batch)
