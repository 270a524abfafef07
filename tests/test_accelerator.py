"""A start as on a GPU, on a CPU: a pool from measured memory, recorded steps, every path tried; a device that dies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import httpx
import pytest
import torch

from model.config import ConfigError, load_config
from model.kv_cost import layout_for, pages_in_budget
from model.ops.reference import ReferenceOps
from server.engine import backend
from server.engine.accelerator import Accelerator, filler_batch, taken_by
from server.engine.core import Engine
from server.engine.decode_graphs import Work
from server.engine.facts import EngineConfig
from server.engine.messages import Progress, SamplingParams, Submit
from server.engine.pool_size import DEVICE_RESERVE, GRAPH_BYTES, MIB, limits_of, widest_prompts
from server.engine.runner import is_out_of_memory
from server.engine.scheduler import Limits
from server.engine.startup import build_engine
from server.engine.stream import StagedStream
from server.serve import graph_lines
from tests.conftest import VOCAB_SIZE, LiveServer
from tests.failing_device import DEVICE_ERROR
from tests.fake_device import outputs
from tests.real_engine import run
from tests.scripted_server import launch

CPU = torch.device("cpu")
SIZES = [1, 2, 4, 8, 16]
STEP, DECODE, POOL, GRAPHS = 100 * MIB, 7 * MIB, 1 * MIB, 3 * MIB
REST = DEVICE_RESERVE + DECODE + 4 * 16 * VOCAB_SIZE + len(SIZES) * GRAPH_BYTES
FREE = STEP + REST + POOL
"""Free memory that leaves exactly POOL bytes for the cache."""


pytestmark = pytest.mark.usefixtures("one_thread")


class FakeMeter:
    """Reports the free memory it was given, one reading after the other."""

    def __init__(self, *readings: int) -> None:
        self.readings = list(readings)
        self.trims = 0

    def free(self) -> int:
        return self.readings.pop(0)

    def trim(self) -> None:
        self.trims += 1


class Recorder:
    """Keeps the order of what was recorded, and how often it was replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, work: Work) -> Work:
        work()
        index = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[index] += 1
            work()

        return replay


def accelerator(capture: Recorder | None, *readings: int) -> Accelerator:
    return Accelerator(StagedStream(CPU), FakeMeter(*readings), capture)


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> EngineConfig:
    return EngineConfig(str(tiny_model()), "cpu", "float32", page_size=4, max_num_seqs=12, max_num_batched_tokens=700)


# ---- sizing the pool --------------------------------------------------------------------------------------


def test_what_work_takes_is_the_free_memory_it_leaves_less() -> None:
    meter, ran = FakeMeter(1000, 400), list[int]()
    assert taken_by(meter, lambda: ran.append(meter.trims)) == 600
    assert ran == [1], "what torch kept from before must not hide what the work takes"


def test_the_widest_step_is_full_of_prompts() -> None:
    assert widest_prompts(Limits(512, 32, 1300)) == [512, 512, 276]
    assert widest_prompts(Limits(512, 32, 512)) == [512]
    assert widest_prompts(Limits(4096, 32, 512)) == [512]


@pytest.mark.parametrize(
    ("asked", "is_wide", "width"),
    [
        ((None, None), False, (32, 512)),
        ((None, None), True, (256, 4096)),
        ((700, None), False, (700, 700)),
        ((None, 16), True, (16, 16)),
        ((8, 64), True, (8, 64)),
    ],
)
def test_a_device_is_given_wider_steps_than_a_cpu(
    asked: tuple[int | None, int | None], is_wide: bool, width: tuple[int, int], config: EngineConfig
) -> None:
    wanted = replace(config, max_num_seqs=asked[0], max_num_batched_tokens=asked[1])
    limits = limits_of(wanted, load_config(Path(config.model)), is_wide)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == width


def test_filler_stays_on_the_scratch_page(tiny_model: Callable[..., Path]) -> None:
    layout = layout_for(load_config(tiny_model("mistral")), 4, "float32")
    batch = filler_batch([5, 1], layout, 9, CPU)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0] and batch.q_starts.tolist() == [0, 5, 6]
    assert batch.logits_rows.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert all(not slots.any() for slots in batch.slots) and all(not table.any() for table in batch.page_table)
    assert len(batch.slots) == len(layout.groups) and batch.page_table[0].shape == (2, 2)


def engine_on(config: EngineConfig, recorder: Recorder) -> Engine:
    """Free: before and after the widest step, before and after a decode, in the end; around the recordings."""
    return build_engine(
        config, accelerator=accelerator(recorder, FREE, FREE - STEP, FREE, FREE - DECODE, FREE, FREE, FREE - GRAPHS)
    )


def test_the_pool_gets_what_the_widest_step_and_the_reserves_leave(config: EngineConfig) -> None:
    info = engine_on(config, Recorder()).info
    layout = layout_for(load_config(Path(config.model)), 4, "float32")
    assert info.num_pages == pages_in_budget(layout, POOL, 512, 700)
    assert POOL - layout.page_bytes(0) < info.kv_bytes_allocated <= POOL
    assert info.workspace_bytes == STEP


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(config: EngineConfig) -> None:
    wide = replace(config, kv_cache_memory=2 * POOL)
    with pytest.raises(MemoryError, match=rf"{2 * POOL} bytes does not fit: {POOL} bytes are available"):
        engine_on(wide, Recorder())
    with pytest.raises(MemoryError, match=r"does not fit: 0 bytes are available|leaves no page to give out"):
        build_engine(config, accelerator=accelerator(Recorder(), 0, 0, 0, 0, 0))


# ---- ready means warm -------------------------------------------------------------------------------------


def test_everything_is_recorded_and_tried_before_ready(config: EngineConfig) -> None:
    recorder, phases = Recorder(), list[Progress]()
    readings = FREE, FREE - STEP, FREE, FREE - DECODE, FREE, FREE, FREE - GRAPHS
    engine = build_engine(config, phases.append, accelerator(recorder, *readings))
    assert engine.info.graphs == len(SIZES) and engine.info.graph_bytes == GRAPHS
    assert [phase.phase for phase in phases if not phase.detail.endswith("layers")] == [
        "kernels",
        "load",
        "allocate",
        "warm_up",
    ]
    (line,) = graph_lines(engine.info)
    assert "5 batch sizes" in line and "3.0 MiB" in line

    warm = list(recorder.replays)
    assert len(warm) == 2 * len(SIZES), "a forward and a sampling of each size"
    assert warm[-2] > 0 and warm[-1] > 0, "the smallest comes last, and the warm-up replays it"
    run(engine, Submit("a", Submit.pack([1, 2, 3]), SamplingParams(5, temperature=0)))
    assert len(recorder.replays) == len(warm) and recorder.replays[-2] == warm[-2] + 4


def test_an_engine_on_an_accelerator_says_what_one_on_a_cpu_says(config: EngineConfig) -> None:
    submits = [Submit(f"r{i}", Submit.pack(list(range(i, 40 + i))), SamplingParams(9, seed=i)) for i in range(5)]
    on_cpu = build_engine(replace(config, kv_cache_memory=POOL))
    assert outputs(run(engine_on(config, Recorder()), *submits)) == outputs(run(on_cpu, *submits))


def test_operations_that_cannot_be_recorded_run_as_they_are(config: EngineConfig) -> None:
    engine = build_engine(config, accelerator=accelerator(None, FREE, FREE - STEP, FREE))
    assert engine.info.graphs == 0 and graph_lines(engine.info) == []
    rows = run(engine, Submit("a", Submit.pack([1, 2, 3]), SamplingParams(5, temperature=0)))
    assert len(outputs(rows)["a", 0]) == 5


def test_batch_invariance_needs_kernels_that_keep_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def reference(device: torch.device, batch_invariant: bool) -> ReferenceOps:
        asked.append(batch_invariant)
        return ReferenceOps()

    monkeypatch.setattr(backend, "ops_for", reference)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"--batch-invariant.*triton"):
        build_engine(replace(config, device="cuda", batch_invariant=True))
    assert asked == [True]


# ---- the device dies --------------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_device_error_ends_every_stream_and_the_server(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    live = launch(tiny_model(), tmp_path / "server.log", "--page-size", "4", module="tests.failing_device")
    try:
        live.wait_ready()
        with ThreadPoolExecutor() as pool:
            running = Barrier(3)
            streams = [pool.submit(stream, live, seed, running.wait) for seed in (1, 2)]
            running.wait(30)  # a request that arrives after the error is not streamed: it meets a plain 503
            answers = [stream(live, DEVICE_ERROR), *(answer.result() for answer in streams)]
        for answer in answers:
            assert "illegal memory access" in answer and answer.endswith("data: [DONE]\n\n"), answer
        assert not live.is_ready()
        assert live.process.wait(20) == 1
        assert "the engine failed: AcceleratorError: CUDA error: an illegal memory access" in live.output
    finally:
        live.process.kill()
        live.process.wait()


def stream(live: LiveServer, seed: int, at_first_token: Callable[[], object] = lambda: None) -> str:
    body = {"prompt": "abc", "seed": seed, "stream": True, "max_tokens": 500, "ignore_eos": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=30) as reply:
        parts = reply.iter_text()
        first = next(parts)
        at_first_token()
        return first + "".join(parts)


def test_a_device_without_memory_is_not_a_broken_one() -> None:
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
