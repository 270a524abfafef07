"""The measuring commands run end to end on a tiny model; their figures are for quiet machines and not judged here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.config import load_config
from model.ops.select import ops_for
from model.weights import load_decoder
from server.engine.facts import EngineConfig
from server.measure.engine import MEASURES, Finding
from server.measure.kv_quality import LENGTH, TEXTS, compare, sampled_texts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", MEASURES)
def test_each_measure_gives_a_figure_beside_its_limit(name: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", max_position_embeddings=4096)
    (finding,) = MEASURES[name](EngineConfig(str(folder), device="cpu", kv_cache_memory=2 << 20, threads=1))
    assert finding.figure < 100 and f"at most {finding.limit:g}" in finding.line()


def test_a_missed_limit_is_said() -> None:
    assert "MISSED" in Finding("gap", 3.1, 3, "").line() and "MISSED" not in Finding("gap", 3.0, 3, "").line()


def test_the_quality_of_cache_dtypes_is_compared_on_the_same_tokens(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    texts = sampled_texts(folder)
    decoder = load_decoder(folder, load_config(folder), ops_for("cpu"), "cpu", torch.float32)
    found = {quality.dtype: quality for quality in compare(decoder, texts[:2], "float32")}
    assert [len(text) for text in texts] == [LENGTH] * TEXTS and texts[0] != texts[1]
    assert 0 < found["float16"].mean < found["bfloat16"].mean < found["int8"].mean < found["float8_e4m3fn"].mean
    assert all(0.8 < quality.agreement <= 1 and 0 < quality.divergence < 0.1 for quality in found.values())
    assert found["int8"].token_bytes == 2 * 2 * 2 * (8 + 4)
