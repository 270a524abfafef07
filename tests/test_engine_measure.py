"""The measuring commands run end to end on a tiny model; their figures are for quiet machines and not judged here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from server.engine.measure import MEASURES, Finding
from server.engine.messages import EngineConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MEASURES)
def test_each_measure_gives_a_figure_beside_its_limit(name: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", max_position_embeddings=4096)
    (finding,) = MEASURES[name](EngineConfig(str(folder), device="cpu", kv_cache_memory=16 << 20, threads=1))
    assert finding.figure < 100 and f"at most {finding.limit:g}" in finding.line()


def test_a_missed_limit_is_said() -> None:
    assert "MISSED" in Finding("gap", 3.1, 3, "").line() and "MISSED" not in Finding("gap", 3.0, 3, "").line()
