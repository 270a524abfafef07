"""What a fault in the engine may touch: NaN and a lack of memory end the request they belong to, the rest go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder
from model.kv_cache import KVCache
from server.engine.messages import SamplingParams, Submit
from tests.fake_device import expected, finishes, outputs, rig
from tests.real_engine import Setup, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.fault
def test_nan_ends_that_request_and_its_pages_are_not_reused() -> None:
    """omlx 3777: NaN logits became token 0 with status 200."""
    engine = rig()
    engine.device.fault = lambda row: "nan" if row.sequence.request.id == "bad" else None
    prompt = [1] * 9
    engine.submit("bad", prompt, n=2)
    good = engine.submit("good", [2] * 9)
    rows = engine.run()
    assert finishes(rows) == {("bad", 0): "error", ("bad", 1): "error", ("good", 0): "length"}
    assert "NaN" in str(next(row.error for row in rows if row.id == "bad"))
    assert outputs(rows)[("good", 0)] == expected([2] * 9, good)
    assert outputs(rows)[("bad", 0)] == []
    assert engine.engine.step().stats.nan_rows == 1
    engine.submit("again", prompt, max_tokens=1)
    assert engine.run()[0].cached_tokens == 0


@pytest.mark.fault
def test_a_failed_row_ends_its_request_alone() -> None:
    engine = rig()
    engine.device.fault = lambda row: "out of memory" if row.sequence.request.id == "big" and row.end > 9 else None
    engine.submit("big", [1] * 9, n=2, max_tokens=5)
    small = engine.submit("small", [2] * 9)
    rows = engine.run()
    assert {row.id: row.error for row in rows if row.error} == {"big": "out of memory"}
    assert outputs(rows)[("small", 0)] == expected([2] * 9, small)
    assert len(outputs(rows)[("big", 0)]) == len(outputs(rows)[("big", 1)]) == 1


TORCHS = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
OURS = MemoryError("rw_layers lacked memory")


class Narrow:
    """A decoder with memory for so many tokens at a time."""

    def __init__(self, decoder: Decoder, most: int, lack: Exception = TORCHS) -> None:
        self.decoder, self.most, self.lack = decoder, most, lack
        self.widths: list[int] = []

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        self.widths.append(len(batch.token_ids))
        if len(batch.token_ids) > self.most:
            raise self.lack
        return self.decoder.hidden(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def submits(*lengths: int, **fields: object) -> list[Submit]:
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, "logprobs": 1, **fields})  # type: ignore[arg-type]
    return [Submit(f"r{length}", Submit.pack([length] * length), params) for length in lengths]


@pytest.mark.fault
@pytest.mark.parametrize("lack", [TORCHS, OURS], ids=["torch", "native"])
def test_a_step_that_lacks_memory_is_rerun_by_halves(tiny_model: Callable[..., Path], lack: Exception) -> None:
    plenty = run(Setup().engine(tiny_model()), *submits(3, 4, 5, 6))
    narrow: list[Narrow] = []
    engine = Setup().engine(tiny_model(), lambda decoder: narrow.append(Narrow(decoder, 7, lack)) or narrow[0])  # type: ignore[func-returns-value]
    rows = run(engine, *submits(3, 4, 5, 6))
    assert narrow[0].widths[:6] == [18, 7, 11, 5, 6, 4]
    assert [(row.id, row.tokens, row.logprobs) for row in rows] == [(r.id, r.tokens, r.logprobs) for r in plenty]


@pytest.mark.fault
@pytest.mark.parametrize("overlaps", [False, True])
def test_who_lacks_memory_alone_is_told_and_the_rest_go_on(tiny_model: Callable[..., Path], overlaps: bool) -> None:
    engine = Setup(overlaps=overlaps).engine(tiny_model(), lambda decoder: Narrow(decoder, 8))
    rows = run(engine, *submits(3, 20, 5))
    assert finishes(rows) == {("r3", 0): "length", ("r20", 0): "error", ("r5", 0): "length"}
    assert "out of memory while computing 20 tokens" in str(next(row.error for row in rows if row.error))
    alone = run(Setup().engine(tiny_model()), *submits(3))
    assert outputs(rows)[("r3", 0)] == outputs(alone)[("r3", 0)]


UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
import torch
from tests.real_engine import Setup, run
from tests.test_engine_faults import Narrow, submits
torch.set_num_threads(1)
seen = []
def count(decoder):
    seen.append(Narrow(decoder, 1 << 30))
    return seen[0]
engine = Setup(max_num_seqs=24).engine(Path(sys.argv[1]), count)
run(engine, *submits(2))
if sys.argv[2] == "limited":
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20),) * 2)
rows = run(engine, *submits(*range(3, 27), max_tokens=2))
print(json.dumps([len(seen[0].widths), sorted([row.id, row.tokens, row.logprobs[0].logprob] for row in rows)]))
"""


@pytest.mark.slow
@pytest.mark.fault
def test_under_a_memory_limit_of_the_system_the_same_tokens_come(tiny_model: Callable[..., Path]) -> None:
    """RLIMIT_AS leaves room for the logits of a few rows (400 kB each, and what sampling makes of them), not of 24."""
    folder, root = str(tiny_model(vocab_size=100_000)), str(Path(__file__).parent.parent)

    def run_as(how: str) -> tuple[int, list[object]]:
        command = [sys.executable, "-c", UNDER_A_LIMIT, folder, how]
        env = os.environ | {"PYTHONPATH": root, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
        forwards, rows = json.loads(subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout)
        return forwards, rows

    plenty, limited = run_as("free"), run_as("limited")
    assert limited[1] == plenty[1]
    assert limited[0] > plenty[0], "nothing was rerun: the limit was too wide to show anything"


class Poisoned:
    """A decoder whose states turn to NaN wherever a token id occurs."""

    def __init__(self, decoder: Decoder, token: int) -> None:
        self.decoder, self.token = decoder, token

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        hidden = self.decoder.hidden(batch, kv)
        hidden[batch.token_ids == self.token] = torch.nan
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


UNSAMPLED = {"max_tokens": 0}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"prompt_logprobs": 0}, UNSAMPLED])
@pytest.mark.fault
def test_nan_from_the_model_never_becomes_a_token(tiny_model: Callable[..., Path], fields: dict[str, object]) -> None:
    bad, good = submits(20, 5, **fields)
    rows = run(Setup().engine(tiny_model(), lambda decoder: Poisoned(decoder, 20)), bad, good)
    assert finishes(rows) == {("r20", 0): "error", ("r5", 0): "length"}
    assert outputs(rows)[("r20", 0)] == []
    assert outputs(rows)[("r5", 0)] == outputs(run(Setup().engine(tiny_model()), good))[("r5", 0)]


@pytest.mark.fault
def test_nan_never_becomes_an_embedding_and_its_pages_are_forgotten(tiny_model: Callable[..., Path]) -> None:
    engine = Setup().engine(tiny_model(), lambda decoder: Poisoned(decoder, 20))
    prompt = Submit.pack([20] * 9)
    (row,) = run(engine, Submit("e", prompt, SamplingParams(1), kind="embed"))
    assert row.finish == "error" and row.embedding is None
    assert engine.tables.pools[0].num_cached == 0


def test_other_errors_of_the_model_are_not_swallowed(tiny_model: Callable[..., Path]) -> None:
    class Broken(Narrow):
        def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
            raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(Setup().engine(tiny_model(), lambda decoder: Broken(decoder, 1)), *submits(3))
