"""What an engine does with a folder or settings that do not work: one clear line, or a warning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from server.engine.facts import EngineConfig
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine, kv_resident_bytes
from server.engine.worker import explain


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> EngineConfig:
    return EngineConfig(str(tiny_model()), device="cpu", page_size=4, kv_cache_memory=1 << 20, threads=1)


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "model.safetensors"),
    (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
]


@pytest.mark.parametrize(("damage", "says"), BROKEN)
def test_a_broken_folder_is_one_clear_line(
    config: EngineConfig, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    for file in Path(config.model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    assert says in line_about(replace(config, model=str(tmp_path)))


UNWORKABLE: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_memory": 1 << 60}, "--kv-cache-memory"),
    ({"kv_cache_memory": 100}, "--kv-cache-memory"),
    ({"max_model_len": 1 << 20}, "--max-model-len"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
    ({"dtype": "int3"}, "bfloat16"),
]


@pytest.mark.parametrize(("changes", "says"), UNWORKABLE)
def test_settings_that_cannot_work_are_one_clear_line(config: EngineConfig, changes: dict[str, Any], says: str) -> None:
    assert says in line_about(replace(config, **changes))


def line_about(config: EngineConfig) -> str:
    """What the operator reads when this configuration does not start."""
    with pytest.raises((ValueError, OSError, MemoryError)) as caught:
        build_engine(config)
    line = explain(caught.value)
    assert "\n" not in line and "the engine failed" not in line
    return line


def test_a_small_pool_lowers_the_length_and_says_so(config: EngineConfig) -> None:
    engine = build_engine(replace(config, kv_cache_memory=64 << 10))
    limit = engine.info.max_model_len
    assert limit < 512 and any(str(limit) in warning for warning in engine.info.warnings)
    engine.add(Submit("too-long", Submit.pack([1] * limit), SamplingParams(1)))
    (row,) = engine.step().rows
    assert row.finish == "error" and str(limit) in str(row.error)


def test_of_a_pool_that_was_written_as_much_is_in_memory_as_was_allocated() -> None:
    """Not the rest of the system's last page."""
    pool = KVCache(KVLayout(4, (KVGroup((0,), None, 2, 8, "float32"),)), (5,), "cpu")
    pool.storages[0].zero_()
    assert kv_resident_bytes(pool) == pool.nbytes == 2560
