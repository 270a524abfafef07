"""The measuring commands run once each, on shapes that are small; their lines are looked at, their times are not."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.ops.cpu.bench import WHAT, run
from tests.conftest import REPOSITORY
from tests.native_ops import native_library
from tests.test_ops_cpu_bench import TINY

NUMBER = r"\d+\.\d+"


def lines_of(module: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()


def test_engine_phases_are_a_table() -> None:
    lines = lines_of("server.measure.phases", "--sequences", "3", "--context", "8", "--steps", "5")
    title, header, *rows, limit = lines
    assert re.search(rf"to schedule a step: {NUMBER} \(at most", limit)
    assert title.startswith("3 sequences of 8 tokens, 5 decode steps") and header.split() == ["phase", "median", "p99"]
    found = [re.fullmatch(rf"(\S.*?) +({NUMBER}) +({NUMBER})", row) for row in rows]
    assert [line[1] for line in found if line] == [
        "schedule", "pack the batch", "sampling inputs", "collect and report", "statistics", "whole step",
    ]  # fmt: skip
    assert all(line and float(line[2]) <= float(line[3]) for line in found)


def test_a_start_is_told_phase_by_phase(tiny_model: Callable[..., Path]) -> None:
    title, *rows = lines_of(
        "server.measure.start_time", str(tiny_model()), "--rounds", "1", "--kv-cache-memory", "512KiB"
    )
    assert "median of 1 starts" in title
    times = {row[:14].strip(): float(row[14:]) for row in rows}
    assert 0 < times["listening"] <= times["ready"] <= times["first answer"]
    assert {"load", "allocate", "warm_up"} <= set(times)


def test_the_cost_of_a_token_is_told_for_each_number_of_streams(tiny_model: Callable[..., Path]) -> None:
    options = ("--streams", "1,2", "--tokens", "4", "--step-ms", "0.1")
    title, *rows = lines_of("server.measure.token_cost", str(tiny_model()), *options)
    assert "4 tokens, a step every 0.1 ms" in title
    cost = rf"-?{NUMBER} a token, -?{NUMBER} a step"
    found = [re.fullmatch(rf" +(\d) streams: HTTP process {cost}; engine process {cost}", row) for row in rows]
    assert [line and line[1] for line in found] == ["1", "2"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("server.measure.start_time ./absent", "ropeway: no model at ./absent"),
        ("server.measure.start_time --max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("server.measure.start_time --rounds 0", "argument --rounds: "),
        ("server.measure.token_cost ./absent", "ropeway: no model at ./absent"),
        ("server.measure.token_cost --streams 1,0", "argument --streams: "),
        ("server.measure.phases --sequences 0", "argument --sequences: "),
        ("server.measure.engine gaps --model ./absent", "no config.json in ./absent"),
        ("server.measure.kv_quality ./absent", "no config.json in ./absent"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(command: str, says: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode in (1, 2) and says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_every_operation_is_set_beside_its_limit(capsys: pytest.CaptureFixture[str], quantization: str | None) -> None:
    native_library()
    options = Namespace(
        cpu_time=True, seconds=0.0, no_reference=False, dtype="bfloat16", quantization=quantization, kv_cache_dtype=None
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(options, TINY, torch.bfloat16, WHAT[:3])
    finally:
        torch.set_num_threads(before)
    machine, limits, *rows = capsys.readouterr().out.splitlines()
    assert f"weights {quantization or 'bfloat16'}; shape of tiny" in machine and limits.startswith("read ")
    found = [re.match(rf"(\w+), .* {NUMBER} ms .* of the limit: .*reference +{NUMBER} ms", row) for row in rows]
    assert list(dict.fromkeys(line and line[1] for line in found)) == ["attention", "linears", "step"]
