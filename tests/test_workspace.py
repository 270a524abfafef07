"""The memory that is set aside for the widest step is more than that step takes, on a real engine in a process alone.

Measured by the system: the most that was resident (VmHWM, begun anew before the step), so that torch's tensors, the
kernels' own buffers and what numpy holds all count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder
from model.kv_cache import KVCache
from server.engine.messages import SamplingParams, Submit
from tests.conftest import REPOSITORY
from tests.real_engine import Setup, run

VOCABULARY, SEQUENCES, SCORED = 20_000, 96, 64
WIDEST_STEP = """
import json, re, sys
from dataclasses import replace
from pathlib import Path
from server.engine.facts import EngineConfig
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine

EVERYTHING = SamplingParams(
    2, temperature=0.8, top_k=16_000, top_p=0.95, min_p=1e-6, seed=1, presence_penalty=0.5, frequency_penalty=0.5,
    repetition_penalty=1.1, logit_bias=((65, 1.0),), allowed_token_ids=tuple(range(16_000)), bad_words=((66,), (1, 2)),
    stop_token_ids=(3,), min_tokens=1, logprobs=20,
)
seqs, scored = map(int, sys.argv[2:])
engine = build_engine(EngineConfig(sys.argv[1], device="cpu", dtype="float32", kv_cache_memory=1 << 20, threads=1,
                                   max_num_seqs=seqs, max_num_batched_tokens=512))

def ask(count, scored):
    engine.add(Submit("scored", Submit.pack([1] * scored), replace(EVERYTHING, prompt_logprobs=20)))
    for index in range(1, count):
        engine.add(Submit(str(index), Submit.pack([index] * ((512 - scored) // (seqs - 1))), EVERYTHING))
    return engine.step()

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

ask(2, 2)
while engine.has_work:
    engine.step()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
output = ask(seqs, scored)
tokens = sum(len(row.tokens) for row in output.rows)
told = sum(len(row.prompt_logprobs or ()) for row in output.rows)
print(json.dumps([resident("VmHWM") - before, engine.info.workspace_bytes, tokens, told]))
"""


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_widest_step_takes_less_than_is_set_aside(tiny_model: Callable[..., Path], kernels: str) -> None:
    """Every row penalised, restricted, filtered and reported with 20 alternatives; 64 rows of a prompt are scored."""
    command = [sys.executable, "-c", WIDEST_STEP, str(tiny_model(vocab_size=VOCABULARY)), str(SEQUENCES), str(SCORED)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back
    if kernels == "off":
        env["ROPEWAY_KERNELS"] = "off"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    taken, set_aside, tokens, scored = json.loads(done.stdout)
    assert (tokens, scored) == (SEQUENCES, SCORED), "the step was not the widest"
    assert 2 * SEQUENCES * VOCABULARY * 4 < taken < set_aside, "less than logits and a copy: something was not seen"


class Counted:
    """A decoder, and the rows of each call for logits."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def around(self, decoder: Decoder) -> Counted:
        self.decoder = decoder
        return self

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        return self.decoder.hidden(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return self.decoder.logits(hidden)


def test_logits_are_computed_for_sampled_rows_alone(tiny_model: Callable[..., Path]) -> None:
    """A prompt in chunks has none before its last one; a choice has one row a token."""
    counted = Counted()
    engine = Setup(budget=7).engine(tiny_model(), counted.around)
    submits = [Submit(name, Submit.pack([7] * 20), SamplingParams(4, n=2)) for name in "ab"]
    rows = run(engine, *submits)
    assert sum(counted.rows) == sum(len(row.tokens) for row in rows) == 16
    assert max(counted.rows) <= 4
