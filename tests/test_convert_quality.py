"""What quantised weights cost: the yardstick is GGUF's q8_0, the figures are those of an independent forward."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from convert.__main__ import main_verify
from convert.formats.huggingface import open_huggingface
from convert.forward import logits
from convert.quality import TEXT, WINDOW, measure_quality, rounded_to_q8_0, windows_of
from convert.readings import source_reading
from tests.conftest import ModelFactory, make_byte_tokenizer
from tests.native_ops import native_library


@pytest.fixture
def folder(tiny_model: ModelFactory) -> Path:
    """Rows of whole runs of 32 weights, as q8_0 wants them."""
    native_library()
    folder = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    make_byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_q8_0_is_that_of_gguf() -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    weight[3, 32:64] = 0
    codes = quants.quantize(weight.numpy(), GGMLQuantizationType.Q8_0)
    expected = quants.dequantize(codes, GGMLQuantizationType.Q8_0)
    assert np.array_equal(rounded_to_q8_0(weight).numpy(), expected)


def test_figures_are_those_of_another_forward(folder: Path) -> None:
    comparison, windows = measure_quality(folder, "int8"), windows_of(folder)
    base, own, yardstick = comparison.base, comparison.own, comparison.q8_0
    assert base.tokens == own.tokens == len(windows) * (WINDOW - 1) and len(windows) * WINDOW > 10_000
    assert base.kl == 0 and base.same_greedy == 1
    assert yardstick is not None and 0 < yardstick.kl < own.kl < 0.1 and own.same_greedy > 0.9
    reading, nll = source_reading(open_huggingface(folder)), 0.0
    for ids in windows[:2]:
        scores = torch.from_numpy(logits(reading, ids)).log_softmax(-1)
        nll -= float(scores[torch.arange(WINDOW - 1), torch.tensor(ids[1:])].mean()) / 2
    assert math.log(base.perplexity) == pytest.approx(nll, rel=0.05)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_the_command_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main_verify([str(folder), "--quantization", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["bf16", kind, "q8_0"] and "times q8_0's" in lines[4]


def test_the_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_verify([str(folder), "--quantization", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"base", "own", "q8_0", "kl_over_q8_0"}


def test_odd_widths_are_measured_without_the_yardstick(
    tiny_model: ModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    native_library()
    odd = tiny_model("llama", intermediate_size=90)
    assert main_verify([str(odd), "--quantization", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["bf16", "int8"] and "q8_0 cannot be compared" in lines[-1]
    assert main_verify([str(odd), "--quantization", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["own"]["kl"] < 0.1 and found["q8_0"] is found["kl_over_q8_0"] is None


def test_what_cannot_be_measured_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").unlink()
    assert main_verify([str(folder), "--quantization", "int8"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        main_verify([str(folder), "--quantization", "int8", "--against", str(folder)])
    assert usage.value.code == 2


def test_the_text_holds_many_kinds() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert all(sign in text for sign in ("def ", "#include", "SELECT", "ü", "é", "ñ", "缆车", "снег"))
