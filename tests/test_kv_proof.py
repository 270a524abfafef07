"""Predicted is allocated, and predicted concurrency is what runs: arithmetic against real pools and a real engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import load_config
from model.kv_cache import KVCache
from model.kv_cost import DTYPE_BYTES, SCALE_BYTES, KVGroup, KVLayout, layout_for
from server.engine.facts import EngineConfig, EngineInfo, EngineStats
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine
from server.engine.views import kv_summary
from server.kv_views import summary

CPU = torch.device("cpu")
SHAPES = {"mha": 6, "gqa": 2, "mqa": 1}
WINDOWS = [(None, None), (7, 7), (None, 7)]


def by_hand(page_size: int, groups: list[tuple[int, int]], heads: int, dtype: str) -> int:
    """2 (k, v) * layers * heads * (head_dim * bytes + scale), page by page; groups: (layers, pages)."""
    row = 8 * DTYPE_BYTES[dtype] + (4 if dtype in ("int8", "float8_e4m3fn") else 0)
    return sum(2 * layers * heads * row * page_size * pages for layers, pages in groups)


@pytest.mark.parametrize(("shape", "page_size", "dtype"), [*product(SHAPES, (1, 4, 16), DTYPE_BYTES)])
@pytest.mark.parametrize("windows", WINDOWS)
def test_predicted_is_allocated_to_the_byte(
    shape: str, page_size: int, dtype: str, windows: tuple[int | None, ...]
) -> None:
    heads = SHAPES[shape]
    kinds = sorted(set(windows), key=windows.index)
    groups = tuple(
        KVGroup(tuple(i for i, w in enumerate(windows) if w == kind), kind, heads, 8, dtype, SCALE_BYTES.get(dtype, 0))
        for kind in kinds
    )
    layout, counts = KVLayout(page_size, groups), tuple(5 + 3 * index for index in range(len(groups)))
    pool = KVCache(layout, counts, CPU)
    held = sum(storage.untyped_storage().nbytes() for storage in pool.storages)
    shares = [(len(group.layers), count) for group, count in zip(groups, counts, strict=True)]
    assert layout.pool_bytes(counts) == held == by_hand(page_size, shares, heads, dtype)


def test_scales_are_in_the_arithmetic() -> None:
    """One fp32 scale beside each k and v: a sixteenth more at 64 channels."""
    plain = KVGroup((0, 1), None, 2, 64, "int8")
    scaled = KVGroup((0, 1), None, 2, 64, "int8", scale_bytes=4)
    assert scaled.token_bytes - plain.token_bytes == 2 * 2 * 2 * 4
    assert scaled.token_bytes / plain.token_bytes == 1.0625
    assert KVGroup((0, 1), None, 2, 64, "bfloat16").token_bytes == 2 * plain.token_bytes


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("heads", "ranks", "of_a_rank"), [(8, 2, 4), (2, 2, 1), (2, 4, 1), (1, 8, 1)])
def test_with_fewer_heads_than_ranks_each_holds_a_copy(heads: int, ranks: int, of_a_rank: int, dtype: str) -> None:
    layout = KVLayout(4, (KVGroup((0, 1, 2), None, heads, 8, dtype, SCALE_BYTES.get(dtype, 0)),))
    rank = KVCache(layout.shard(ranks), (9,), CPU)
    assert rank.nbytes == layout.shard(ranks).pool_bytes((9,)) == by_hand(4, [(3, 9)], of_a_rank, dtype)
    assert ranks * rank.nbytes == layout.pool_bytes((9,)) * max(1, ranks // heads)


class Served:
    """A real engine, and what it says of itself."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        plain: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "page_size": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 32,
            "threads": 1,
        }
        self.engine = build_engine(EngineConfig(str(folder), **(plain | settings)))
        self.info: EngineInfo = self.engine.info

    def fill(self, count: int) -> list[EngineStats]:
        """Requests that share nothing and grow to the full length, all at once."""
        for index in range(count):
            prompt = Submit.pack([index + 1] * 8)
            self.engine.add(Submit(f"r{index}", prompt, SamplingParams(max_tokens=56, temperature=0)))
        stats = []
        while self.engine.has_work:
            stats.append(self.engine.step().stats)
        return stats


def engine_for_three(folder: Path) -> Served:
    layout = layout_for(load_config(folder), 4, "float32")
    pool = layout.pool_bytes(tuple(3 * peak + 1 for peak in layout.peak_pages(64, 32)))
    served = Served(folder, kv_cache_memory=pool, max_num_seqs=8)
    assert kv_summary(served.engine)["full_length_sequences"] == 3
    return served


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_predicted_concurrency_is_reached_without_preemption(tiny_model: Any, kind: str) -> None:
    stats = engine_for_three(tiny_model(kind)).fill(3)
    assert max(step.running for step in stats) == 3 and stats[-1].preemptions == 0


def test_one_more_than_predicted_waits_and_is_served(tiny_model: Any) -> None:
    """Windowed layers are not asked: their peak is that of a long chunk, and short prompts need less."""
    stats = engine_for_three(tiny_model("llama")).fill(4)
    assert any(step.waiting for step in stats)
    assert stats[-1].generation_tokens == 4 * 56


def test_the_summary_of_a_real_engine_reconciles(tiny_model: Any) -> None:
    served = Served(tiny_model("mistral"), kv_cache_memory=300_000)
    served.fill(2)
    shown = summary(kv_summary(served.engine), served.info)["bytes"]
    assert shown["predicted"] == shown["allocated"] == sum(
        shown[part] for part in ("active", "cached", "free", "scratch")
    )  # fmt: skip
    assert shown["allocated"] <= 300_000 and shown["resident"] > 0


def test_warm_up_is_not_in_the_books(tiny_model: Any) -> None:
    served = Served(tiny_model("llama"), kv_cache_memory=1 << 18)
    books = kv_summary(served.engine)
    assert (books["prefix_queries"], books["slots_used"], books["preemptions"]) == (0, 0, 0)
    assert [group["free"] for group in books["groups"]] == [group["pages"] for group in books["groups"]]
