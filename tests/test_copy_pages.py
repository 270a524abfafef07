"""Pages that choices share until one of them writes: what happens where the copy lacks memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from model.ops.interface import LayerKV
from model.ops.reference import ReferenceOps
from server.engine.messages import Row, SamplingParams, Submit
from tests.real_engine import Setup, run


class NoRoomToCopy(ReferenceOps):
    def copy_pages(self, kv: LayerKV, src: Tensor, dst: Tensor) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")


def asking(id: str, prompt: list[int], n: int) -> Submit:
    return Submit(id, Submit.pack(prompt), SamplingParams(max_tokens=5, temperature=0.0, n=n))


def output(rows: list[Row], id: str) -> list[int]:
    return [token for row in rows if row.id == id for token in row.tokens]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.fault
def test_who_lacks_memory_for_a_copy_is_told_and_the_rest_go_on(
    tiny_model: Callable[..., Path], overlaps: bool
) -> None:
    """Its prompt ends inside a page, which its second choice would copy."""
    forks, whole, alone = asking("forks", [1] * 6, 2), asking("whole", [2] * 8, 2), asking("alone", [3] * 6, 1)
    engine = Setup(overlaps=overlaps, reference=True).engine(tiny_model(), ops=NoRoomToCopy())
    rows = run(engine, alone, forks, whole)
    ends = {(row.id, row.choice): (row.finish, row.error) for row in rows if row.finish}
    assert {key: finish for key, (finish, _) in ends.items()} == {
        ("alone", 0): "length",
        ("forks", 0): "error",
        ("forks", 1): "error",
        ("whole", 0): "length",
        ("whole", 1): "length",
    }
    assert "out of memory while copying" in str(ends["forks", 0][1])
    assert output(rows, "alone") == output(run(Setup(reference=True).engine(tiny_model()), alone), "alone")
