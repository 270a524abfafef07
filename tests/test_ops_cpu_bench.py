"""The benchmark of the CPU operations on a tiny shape: every part of a step is told, a neighbour is let go again."""

from __future__ import annotations

import os
import re

import pytest
import torch

from model.config import ModelConfig
from model.ops.cpu.bench import bench_neighbour, neighbour
from model.ops.cpu.bench_parts import REST, TimedOps, bench_parts
from model.ops.cpu.bench_report import Clock
from model.ops.cpu.bench_scene import SHAPES, Model, Shape
from tests.native_ops import native_library

TINY = Shape(
    "tiny",
    ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    ),
)


@pytest.fixture(scope="module")
def ops() -> TimedOps:
    return TimedOps(native_library())


def test_parts_of_a_step_are_counted_and_add_up(ops: TimedOps, capsys: pytest.CaptureFixture[str]) -> None:
    bench_parts(TINY, ops, torch.bfloat16, None, 0.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step, 1 x 1 of 256", "step, 8 x 1 of 256"]
    parts = [re.fullmatch(r"  (\S.*?) +(\d+) calls +([\d.]+) ms +([\d.]+)%", line) for line in lines[1:8]]
    found = {part[1]: (int(part[2]), float(part[4])) for part in parts if part}
    counts = {name: calls for name, (calls, _) in found.items()}
    expected = {"linear": 13, "add_rms_norm": 7, "rope_write": 3, "attention": 3, "silu_mul": 3, "sample": 1, REST: 0}
    assert counts == expected
    assert sum(share for _, share in found.values()) == pytest.approx(100, abs=1)


def test_a_neighbour_takes_turns_and_is_gone_in_the_end(ops: TimedOps, capsys: pytest.CaptureFixture[str]) -> None:
    bench_neighbour(Clock(False, 0.0), Model.of(ops, TINY, torch.bfloat16), torch.bfloat16)
    assert "times (at most 2" in capsys.readouterr().out
    with neighbour() as pid:
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_shapes_are_those_of_the_models() -> None:
    """Weights of matrices and embedding, in millions, as the models' cards round them."""
    millions = {name: round((shape.layer_weights + shape.head_weights) / 1e6) for name, shape in SHAPES.items()}
    assert millions == {"135m": 134, "1b": 1236}
