"""The way back: to Meta's, GGUF's and llama2.c's files and home again, without losing a bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from convert.__main__ import main_convert
from convert.detect import open_source
from convert.errors import ConvertError
from convert.export import export
from convert.formats.gguf import read_gguf
from convert.pipeline import convert
from convert.tokenizer.gguf import tokenizer_files
from convert.tokenizer.gguf_write import tokenizer_metadata
from model.config import load_config
from tests.conftest import BASE_CONFIG, KINDS, ModelFactory, random_tensors
from tests.convert_sources import meta_tensors

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def plain_folder(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A Hugging Face folder without a tokenizer."""
    config = BASE_CONFIG | KINDS[kind] | overrides
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(dtype) for name, tensor in random_tensors(config).items()}, folder / "model.safetensors")
    return folder


def assert_home_again(folder: Path, exported: Path, home: Path) -> None:
    convert(exported, home)
    got, want = load_file(home / "model.safetensors"), load_file(folder / "model.safetensors")
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name].to(want[name].dtype), want[name])] == []


@pytest.mark.proves(format="to {to}", architecture="llama")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("to", ["meta", "gguf", "llama2c"])
def test_there_and_back(to: str, tied: bool, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", tie_word_embeddings=tied)
    comparison = export(folder, tmp_path / "there", to)
    assert comparison.passed and comparison.max_difference < 1e-4
    assert_home_again(folder, tmp_path / "there", tmp_path / "home")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "there", "home"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", ["meta", "gguf"])
def test_half_precision_there_and_back(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", dtype=dtype)
    export(folder, tmp_path / "there", to)
    assert_home_again(folder, tmp_path / "there", tmp_path / "home")


@pytest.mark.proves(format="GGUF", architecture="{kind}")
@pytest.mark.proves(format="to gguf", architecture="{kind}")
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_other_families_to_gguf_and_back(kind: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", kind)
    export(folder, tmp_path / "there", "gguf")
    assert_home_again(folder, tmp_path / "there", tmp_path / "home")
    assert json.loads((tmp_path / "home" / "config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize("to", ["meta", "gguf"])
def test_llama3_scaling_survives(to: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", head_dim=8, rope_theta=500000.0, rope_scaling=LLAMA3, hidden_size=48)
    if to == "gguf":  # eight rotary channels hold too few ratios to read the scaling back
        folder = plain_folder(tmp_path / "wide", head_dim=64, rope_theta=500000.0, rope_scaling=LLAMA3)
    export(folder, tmp_path / "there", to)
    assert open_source(tmp_path / "there").values()["rope_scaling"] == LLAMA3


def test_torch_reads_what_was_written_for_meta(tmp_path: Path) -> None:
    """torch.load without running code; the rows are those that Meta's exporter would give."""
    folder = plain_folder(tmp_path / "hf", dtype=torch.bfloat16)
    export(folder, tmp_path / "there", "meta")
    got = torch.load(tmp_path / "there" / "consolidated.00.pth", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    want = meta_tensors(config, {name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name].float(), want[name])] == []
    params = json.loads((tmp_path / "there" / "params.json").read_text())
    width, m = int(params.get("ffn_dim_multiplier", 1) * int(8 * params["dim"] / 3)), params["multiple_of"]
    assert m * -(-width // m) == config["intermediate_size"]


def test_llama2c_file_of_stories_comes_back_byte_for_byte(shared_data: Path, tmp_path: Path) -> None:
    """From the folder all but the RoPE tables, which are recomputed; from the file itself every byte."""
    original = shared_data / "stories260K" / "stories260K.bin"
    export(original, tmp_path / "same.bin", "llama2c")
    assert (tmp_path / "same.bin").read_bytes() == original.read_bytes()
    export(shared_data / "stories260K" / "hf", tmp_path / "back.bin", "llama2c")
    got, want = (np.fromfile(path, "<f4") for path in (tmp_path / "back.bin", original))
    tables = 2 * 512 * 4
    assert got[:-tables].tobytes() == want[:-tables].tobytes()
    assert np.abs(got[-tables:] - want[-tables:]).max() < 1e-4


@pytest.mark.parametrize("name", ["hf", "meta", "mistral-native", "stories260K-f32.gguf"])
def test_every_stories_format_gives_the_same_meta_tensors(name: str, shared_data: Path, tmp_path: Path) -> None:
    export(shared_data / "stories260K" / name, tmp_path / "meta", "meta")
    if name == "mistral-native":
        got = load_file(tmp_path / "meta" / "consolidated.safetensors")
    else:
        got = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    want = torch.load(shared_data / "stories260K" / "meta" / "consolidated.00.pth", weights_only=True)
    assert [key for key in want if key in got and not torch.equal(got[key], want[key])] == []
    assert want.keys() - got.keys() <= {"output.weight", "rope.freqs"}


def test_gguf_carries_the_tokenizer_or_is_refused(tiny_model: ModelFactory, shared_data: Path, tmp_path: Path) -> None:
    stories = shared_data / "stories260K" / "hf"
    export(stories, tmp_path / "stories.gguf", "gguf")
    convert(tmp_path / "stories.gguf", tmp_path / "home")
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (stories, tmp_path / "home"))
    for text in ("Once upon a time", "  two  spaces", "Żółw 🐢 7\n", ""):
        assert before.encode(text).ids == after.encode(text).ids
    with pytest.raises(ConvertError, match="no pre-tokenizer of GGUF cuts text as this tokenizer does"):
        export(tiny_model("llama"), tmp_path / "bytes.gguf", "gguf")
    assert not (tmp_path / "bytes.gguf").exists()


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "starcoder"])
def test_real_vocabularies_survive_gguf(name: str, shared_data: Path) -> None:
    """Golden ids after metadata -> tokenizer.json -> metadata -> tokenizer.json."""
    path = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    files = tokenizer_files(read_gguf(path).metadata, path)
    size = len(read_gguf(path).metadata["tokenizer.ggml.tokens"])
    again = tokenizer_files(tokenizer_metadata(files, size, path), path)
    tokenizer = Tokenizer.from_str(again["tokenizer.json"])
    cases = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")[:-1]
    golden = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert [tokenizer.encode(case, add_special_tokens=False).ids for case in cases] == golden
    assert again["generation_config.json"] == files["generation_config.json"]


@pytest.mark.parametrize(
    ("to", "overrides", "reason"),
    [
        ("llama2c", {"rope_theta": 500000.0}, "RoPE base 10000, this model has 500000.0"),
        ("llama2c", {"rms_norm_eps": 1e-6}, "norm epsilon 1e-05, this model has 1e-06: --to hf and --to gguf hold it"),
        ("meta", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "cannot hold rope scaling"),
        ("meta", {"head_dim": 16}, "head_dim that is not dim / n_heads"),
    ],
)
def test_what_a_format_cannot_say_is_refused(to: str, overrides: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", **overrides)
    with pytest.raises(ConvertError, match=reason):
        export(folder, tmp_path / "there", to)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


@pytest.mark.parametrize("to", ["meta", "llama2c"])
@pytest.mark.parametrize(
    ("kind", "tensor"),
    [("qwen2", "self_attn.q_proj.bias"), ("qwen3", "self_attn.q_norm.weight"), ("phi3", "self_attn.qkv_proj.weight")],
)
def test_what_has_no_place_is_named(to: str, kind: str, tensor: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", kind)
    words = f"{to} has no place for tensor model.layers.0.{tensor} of a {kind} model: --to hf and --to gguf have"
    with pytest.raises(ConvertError, match=re.escape(words)):
        export(folder, tmp_path / "there", to)


@pytest.mark.proves(format="Mistral", architecture="mistral")
@pytest.mark.proves(format="to meta", architecture="mistral")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": None, "head_dim": 16},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 4.0,
                "attention_factor": 1.0,
            }
        },
    ],
)  # fmt: skip
def test_mistral_goes_to_its_own_files_and_back(overrides: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", "mistral", tie_word_embeddings=tied, **overrides)
    export(folder, tmp_path / "there", "meta")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"params.json", "consolidated.safetensors"}
    assert_home_again(folder, tmp_path / "there", tmp_path / "home")
    want, got = load_config(folder), load_config(tmp_path / "home")
    assert (got.rope, got.windows, got.max_position_embeddings) == (want.rope, want.windows, 512)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_scalings_that_mistrals_files_cannot_say(scaling: dict[str, Any], tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", "mistral", rope_scaling=scaling)
    with pytest.raises(ConvertError, match=r"params\.json cannot hold these rotary settings"):
        export(folder, tmp_path / "there", "meta")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("to", ["meta", "gguf"])
def test_a_narrower_type_on_request_is_judged_as_rounding(to: str, dtype: str, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf")
    comparison = export(folder, tmp_path / "there", to, dtype)
    assert comparison.passed and not comparison.lossless and 0 < comparison.kl < 0.02
    convert(tmp_path / "there", tmp_path / "home")
    kind = {"F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    got, want = load_file(tmp_path / "home" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert [name for name in want if not torch.equal(got[name].to(kind), want[name].to(kind))] == []


def test_metas_files_take_the_tokenizer_that_goes_with_them(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "with"
    shutil.copytree(shared_data / "stories260K" / "hf", source)
    (source / "tokenizer.model").write_bytes(b"as it is")
    assert main_convert([str(source), str(tmp_path / "a"), "--to", "meta"]) == 0
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == b"as it is"
    assert "no tokenizer" not in capsys.readouterr().err
    assert main_convert([str(plain_folder(tmp_path / "hf")), str(tmp_path / "b"), "--to", "meta"]) == 0
    assert "no tokenizer is written" in capsys.readouterr().err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plain_folder(tmp_path / "hf")
    assert main_convert([str(folder), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    out = capsys.readouterr().out
    assert "every tensor reads back" in out and f"a.gguf: done, {(tmp_path / 'a.gguf').stat().st_size:,} bytes" in out
    assert main_convert([str(folder), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--to", "gguf", "--max-shard-size", "1GB"], "--max-shard-size goes with --to hf"),
        (["--max-shard-size", "0"], "'0' is not a size from 1 byte up"),
        (["--max-shard-size", "5EB"], "'5EB' is not a size from 1 byte up"),
        (["--max-shard-size", "5"], "'5' would be 5 bytes: add a unit, as in 5GiB"),
    ],
)
def test_wrong_usage(words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main_convert([str(tmp_path), str(tmp_path / "out"), *words])
    assert stop.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize("paths", [["", "out"], ["model.gguf", ""]])
def test_an_empty_path_is_not_the_current_folder(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_convert(paths)
    assert "'' is not a path" in capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConvertError, match=r"tokenizer\.json is not a tokenizer"):
        export(folder, tmp_path / "there.gguf", "gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
