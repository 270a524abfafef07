"""llama2.c files of every version, tied and not, and files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from convert.detect import open_source
from convert.errors import ConvertError
from convert.pipeline import convert
from convert.tokenizer.gguf import tokenizer_files
from model.config import load_config
from tests.conftest import BASE_CONFIG, random_tensors
from tests.convert_sources import write_llama2c, write_llama2c_torch

CONFIG = BASE_CONFIG | {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 40}


def config(tied: bool, kv_heads: int = 2) -> dict[str, Any]:
    return CONFIG | {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}


@pytest.mark.proves(format="llama2.c v{version}", architecture="llama")
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_fp32_versions_come_back_bit_for_bit(version: int, tied: bool, kv_heads: int, tmp_path: Path) -> None:
    made = config(tied, kv_heads)
    tensors = random_tensors(made)
    report = convert(write_llama2c(tmp_path / "any.name", made, tensors, version), tmp_path / "out")
    assert report is not None and report["source"]["format"] == f"llama2c-v{version}"
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    assert [row["source"] for row in report["not_used"]] == (["freqs_cos", "freqs_sin"] if version == 0 else [])


@pytest.mark.proves(format="llama2.c v2", architecture="llama")
def test_version_2_is_within_half_a_step_of_its_groups(tmp_path: Path) -> None:
    tensors = random_tensors(config(False))
    convert(write_llama2c(tmp_path / "a.bin", config(False), tensors, 2), tmp_path / "out")
    for name, got in load_file(tmp_path / "out" / "model.safetensors").items():
        step = tensors[name].abs().max() / 127
        assert (got - tensors[name]).abs().max() <= (0.51 * step if got.ndim == 2 else 0), name


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_another_length_than_the_header_says(version: int, change: int, tmp_path: Path) -> None:
    path = write_llama2c(tmp_path / "a.bin", config(True), random_tensors(config(True)), version)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0")
    with pytest.raises(ConvertError, match="its header describes"):
        open_source(path)


def test_rope_tables_of_another_base_are_refused(tmp_path: Path) -> None:
    path = write_llama2c(tmp_path / "a.bin", config(True), random_tensors(config(True)), 0)
    data = bytearray(path.read_bytes())
    data[-4000:-3000] = bytes(1000)
    path.write_bytes(data)
    with pytest.raises(ConvertError, match="freqs_sin does not belong to RoPE base 10000"):
        open_source(path)


def test_tokenizer_beside_the_checkpoint_is_found_by_content(shared_data: Path, tmp_path: Path) -> None:
    """tok512.bin gives the tokenizer that the GGUF of the same model carries."""
    from convert.formats.gguf import read_gguf

    stories = shared_data / "stories260K"
    convert(stories / "stories260K.bin", tmp_path / "out")
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    gguf = stories / "stories260K-f32.gguf"
    theirs = Tokenizer.from_str(tokenizer_files(read_gguf(gguf).metadata, gguf)["tokenizer.json"])
    golden = json.loads((stories / "expected_greedy200.json").read_text())
    text = theirs.decode(golden["ids"])
    assert ours.encode(text).ids == theirs.encode(text).ids and ours.decode(golden["ids"]) == text
    assert ours.encode("Żółw 🐢 7").ids == theirs.encode("Żółw 🐢 7").ids


# ---- training checkpoints (.pt) ----------------------------------------------------------------------------


@pytest.mark.proves(format="llama2.c .pt", architecture="llama")
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_training_checkpoint_comes_back(prefix: str, tmp_path: Path) -> None:
    made = config(tied=True)
    tensors = random_tensors(made)
    report = convert(write_llama2c_torch(tmp_path / "ckpt.pt", made, tensors, prefix), tmp_path / "out")
    assert report is not None and report["proof"]["logits"]["passed"]
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    assert report["not_used"] == [{"source": "output.weight", "reason": "equals tok_embeddings.weight"}]
    assert report["metadata_not_used"]["optimizer"] == "state of the training"
    assert load_config(tmp_path / "out").max_position_embeddings == 512


def test_other_archives_say_what_they_lack(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(ConvertError, match=r"a torch archive of a\.weight, not of model and model_args"):
        open_source(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-30])
    with pytest.raises(ConvertError, match="not a sound zip archive"):
        open_source(tmp_path / "b.pt")


def test_a_file_of_another_length_is_told_both(tmp_path: Path) -> None:
    path = write_llama2c(tmp_path / "a.bin", config(True), random_tensors(config(True)), 0)
    raw = path.read_bytes()
    for damaged in (raw[:-10], raw + b"ab", raw[:28]):
        path.write_bytes(damaged)
        words = f"llama2.c file of {len(raw):,} bytes, it has {len(damaged):,}: copy it again"
        with pytest.raises(ConvertError, match=words):
            open_source(path)
    path.write_bytes(b"")
    with pytest.raises(ConvertError, match="is empty"):
        open_source(path)
