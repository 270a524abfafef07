"""A real trained model (stories260K) in every format, held to the logits and the text that it is known for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from convert.detect import open_source
from convert.formats.huggingface import open_huggingface
from convert.forward import logits
from convert.pipeline import convert
from convert.readings import canonical_reading
from convert.recheck import verify_folder
from model.config import load_config
from model.ops.reference import ReferenceOps
from model.weights import load_decoder
from tests.convert_sources import adjacent_rows
from tests.test_decoder import Session

LOSSLESS = ["stories260K-f32.gguf", "stories260K.bin", "meta", "meta-mp2-llama3", "mistral-native"]


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260K"


@pytest.mark.parametrize("name", LOSSLESS)
def test_logits_and_the_golden_text(name: str, stories: Path, tmp_path: Path) -> None:
    """Greedy choices at every position of the golden 200 tokens, so that one forward stands for the whole decoding."""
    convert(stories / name, tmp_path / "out")
    source = open_huggingface(tmp_path / "out")
    reading = canonical_reading(source.table, source.raw)
    golden = json.loads((stories / "expected_greedy200.json").read_text())["ids"]
    got = logits(reading, golden)
    expected = np.load(stories / "expected_logits_first32.npz")
    assert expected["ids"].tolist() == golden[:32]
    assert np.abs(got[:32] - expected["logits"]).max() < 1e-4
    assert got[:-1].argmax(-1).tolist() == golden[1:]


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_served_decoder_gives_the_same_logits(name: str, stories: Path, tmp_path: Path) -> None:
    """What runs behind HTTP reads the converted folder as the proof does."""
    convert(stories / name, tmp_path / "out")
    decoder = load_decoder(tmp_path / "out", load_config(tmp_path / "out"), ReferenceOps(), "cpu", torch.float32)
    session = Session(decoder)
    expected = np.load(stories / "expected_logits_first32.npz")
    with torch.no_grad():
        got = session.feed({"golden": expected["ids"].tolist()})["golden"]
    assert np.abs(got.numpy() - expected["logits"]).max() < 1e-4


def test_text_tells_the_pairing_of_a_trained_model(stories: Path, tmp_path: Path) -> None:
    """The adjacent rows of the original under Hugging Face's names: fluent, and refused without any source."""
    convert(stories / "stories260K-f32.gguf", tmp_path / "out")
    proof = verify_folder(tmp_path / "out", None).proof
    assert proof.text is not None and proof.text.verdict == "confirmed"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, rows in weights.items():
        for kind, heads in (("q_proj", 8), ("k_proj", 4)):
            if kind in name:
                weights[name] = adjacent_rows(rows, heads)
    save_file(weights, tmp_path / "out" / "model.safetensors")
    proof, problems, *_ = verify_folder(tmp_path / "out", None)
    assert proof.text is not None and proof.text.verdict == "contradicted"
    assert "RoPE pairing by text is contradicted" in (proof.refusal() or "")
    assert len(problems) == 10


def test_q8_0_stays_within_its_own_tolerance(stories: Path, tmp_path: Path) -> None:
    convert(stories / "stories260K-q8_0.gguf", tmp_path / "out")
    source = open_huggingface(tmp_path / "out")
    expected = np.load(stories / "expected_logits_first32.npz")
    got = logits(canonical_reading(source.table, source.raw), expected["ids"].tolist())
    assert 1e-4 < np.abs(got - expected["logits"]).max() < 0.5


@pytest.mark.parametrize("name", LOSSLESS)
def test_tensors_equal_those_of_the_hugging_face_folder(name: str, stories: Path, tmp_path: Path) -> None:
    convert(stories / name, tmp_path / "out")
    want = open_source(stories / "hf").table
    got = open_huggingface(tmp_path / "out").table
    assert got.keys() == want.keys()
    assert [key for key in want if not np.array_equal(got[key].read(), want[key].read())] == []
