"""The account of source tensors: a hash of every one's stored bytes, and `verify` naming those that changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from convert.__main__ import main_convert, main_verify
from convert.detect import open_source
from convert.pipeline import convert
from convert.source_hashes import hash_source, source_files
from tests.conftest import BASE_CONFIG, ModelFactory, random_tensors
from tests.convert_fused_sources import write_litgpt
from tests.convert_sources import adjacent_rows, write_gguf, write_llama2c
from tests.test_convert_torch import write_meta

CONFIG = BASE_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40, "num_attention_heads": 4}
FILE = "model.safetensors"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hashes_of_gguf(path: Path) -> dict[str, str]:
    return {tensor.name: sha256(tensor.data.tobytes()) for tensor in GGUFReader(path).tensors}


def of_gguf(folder: Path) -> tuple[Path, dict[str, str]]:
    path = write_gguf(folder / "model.gguf", CONFIG, random_tensors(CONFIG), quant="Q8_0")
    return path, hashes_of_gguf(path)


def of_pickle(folder: Path) -> tuple[Path, dict[str, str]]:
    """A head that shares the embedding's storage, and a view of the second half of a storage."""
    state = random_tensors(CONFIG | {"tie_word_embeddings": True})
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state["model.norm.weight"] = torch.cat([torch.ones(32), state["model.norm.weight"]])[32:]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    torch.save(state, folder / "pytorch_model.bin")
    return folder, {name: sha256(tensor.numpy().tobytes()) for name, tensor in state.items()}


def of_shards(folder: Path) -> tuple[Path, dict[str, str]]:
    """Of a tensor in several files: its bytes in the order of the files."""
    write_meta(folder, ranks=4, embedding_dim=1)
    ranks = [torch.load(folder / f"consolidated.{rank:02}.pth", weights_only=True) for rank in range(4)]
    joined = {name: b"".join(rank[name].numpy().tobytes() for rank in ranks) for name in ranks[0]}
    return folder, {name: sha256(data) for name, data in joined.items()}


def of_groups(folder: Path) -> tuple[Path, dict[str, str]]:
    """llama2.c's version 2: values, then scales, tensor after tensor, up to the end of the file."""
    path = write_llama2c(folder / "model.bin", CONFIG, random_tensors(CONFIG), 2)
    norm = random_tensors(CONFIG)["model.layers.0.input_layernorm.weight"].numpy().tobytes()
    head = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    last = path.read_bytes()[-(head + head // 8 * 4) :]
    return path, {"layers.0.attention_norm.weight": sha256(norm), "output.weight": sha256(last)}


def of_fused(folder: Path) -> tuple[Path, dict[str, str]]:
    """What is stored counts, not the q, k and v that are cut out of it."""
    path = write_litgpt(folder / "litgpt", CONFIG, random_tensors(CONFIG))
    state = torch.load(path / "lit_model.pth", weights_only=True)
    return path, {name: sha256(tensor.numpy().tobytes()) for name, tensor in state.items()}


@pytest.mark.parametrize("made", [of_gguf, of_pickle, of_shards, of_groups, of_fused])
def test_every_stored_tensor_has_the_hash_of_its_bytes(
    made: Callable[[Path], tuple[Path, dict[str, str]]], tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    source, want = made(tmp_path / "source")
    report = convert(source, tmp_path / "out")
    assert report is not None
    rows = report["source"]["tensors"]
    assert {name: rows[name]["sha256"] for name in want} == want
    named = {name for row in report["tensors"] for name in row.get("parts", [row["source"]])}
    assert rows.keys() == named | {row["source"] for row in report["not_used"]}


def test_a_tensor_that_is_kept_as_stored_has_one_hash_on_both_sides(tmp_path: Path) -> None:
    report = convert(of_gguf(tmp_path)[0], tmp_path / "out")
    assert report is not None
    plain = [row for row in report["tensors"] if row["transform"] == "as stored"]
    assert plain and all(row["sha256"] == report["source"]["tensors"][row["source"]]["sha256"] for row in plain)


def test_files_and_tensors_are_hashed_in_one_reading(tmp_path: Path) -> None:
    config = CONFIG | {"vocab_size": 50_000}
    source = open_source(write_gguf(tmp_path / "model.gguf", config, random_tensors(config)))
    size = sum(path.stat().st_size for path in source_files(source))
    before = bytes_read()
    hashes = hash_source(source)
    assert size <= bytes_read() - before < size + 100_000
    assert hashes.files["model.gguf"]["sha256"] == sha256((tmp_path / "model.gguf").read_bytes())


def bytes_read() -> int:
    """What this process has read so far, as the system counts it."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


# ---- verify ---------------------------------------------------------------------------------------------------


def test_verify_names_the_source_tensor_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit of one weight: far below what logits show."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG))
    assert main_convert([str(path), str(tmp_path / "out")]) == 0
    assert main_verify([str(tmp_path / "out"), "--against", str(path)]) == 0
    assert "source tensors: 21 were converted, none of them changed since" in capsys.readouterr().out
    offset = next(tensor.data_offset for tensor in GGUFReader(path).tensors if tensor.name == "blk.1.attn_v.weight")
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert main_verify([str(tmp_path / "out"), "--against", str(path)]) == 1
    out = capsys.readouterr().out
    assert "source tensor blk.1.attn_v.weight in model.gguf differs from the one that was converted" in out
    assert out.count("source tensor ") == 1


def test_verify_names_tensors_that_came_and_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tied, untied = (random_tensors(CONFIG | {"tie_word_embeddings": tied}) for tied in (True, False))
    for name, tensors in (("a", tied), ("b", untied)):
        write_gguf(tmp_path / f"{name}.gguf", CONFIG, tensors)
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
    assert main_verify([str(tmp_path / "a"), "--against", str(tmp_path / "b.gguf")]) == 1
    assert "source tensor output.weight in b.gguf was not there when" in capsys.readouterr().out
    assert main_verify([str(tmp_path / "b"), "--against", str(tmp_path / "a.gguf")]) == 1
    assert "source tensor output.weight is missing" in capsys.readouterr().out


def test_the_same_model_in_another_format_is_compared_by_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(write_gguf(tmp_path / "a.gguf", CONFIG, random_tensors(CONFIG)), tmp_path / "out")
    path = write_llama2c(tmp_path / "a.bin", CONFIG, random_tensors(CONFIG), 1)
    assert main_verify([str(tmp_path / "out"), "--against", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["notes"][-1] == "source tensors: not compared by hash (made from gguf, this is llama2c-v1)"
    assert found["proof"]["logits"]["passed"] and found["problems"] == []


def test_a_folder_without_a_report_is_told_which_tensors_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody else's conversion, which forgot the keys of one layer."""
    path = write_gguf(tmp_path / "a.gguf", CONFIG, random_tensors(CONFIG))
    convert(path, tmp_path / "out")
    (tmp_path / "out" / "conversion_report.json").unlink()
    command = [str(tmp_path / "out"), "--against", str(path)]
    assert main_verify(command) == 0
    tensors, name = load_file(tmp_path / "out" / FILE), "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = adjacent_rows(tensors[name], CONFIG["num_key_value_heads"])
    save_file(tensors, tmp_path / "out" / FILE)
    capsys.readouterr()
    assert main_verify(command) == 1
    out = capsys.readouterr().out
    assert f"{name} in {FILE} differs from what the source gives" in out and out.count("what the source gives") == 1


@pytest.fixture
def served(tiny_model: ModelFactory, tmp_path: Path) -> Path:
    """A converted folder with a tokenizer."""
    convert(tiny_model("llama"), tmp_path / "served")
    return tmp_path / "served"


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_verify_sees_every_file_and_key_that_the_report_names(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_verify([str(served)]) == 0
    assert capsys.readouterr().out.endswith("verified\n")
    edit(served / "config.json", rms_norm_eps=2e-5, eos_token_id=7)
    (served / "chat_template.jinja").unlink()
    (served / "tokenizer_config.json").write_text("{}")
    assert main_verify([str(served)]) == 1
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "config.json: rms_norm_eps is 2e-05, 1e-05 was written",
        "chat_template.jinja is missing",
        "tokenizer_config.json differs from what was written",
    ):
        assert line in lines
    assert any(line.startswith("config.json: eos_token_id") for line in lines)
    assert lines[-1] == "REFUSED: convert the source again"


def test_many_changes_are_counted(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(served / FILE)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, served / FILE)
    assert main_verify([str(served)]) == 1
    out = capsys.readouterr().out
    assert out.count("differs from what was written") == 10 and f"... and {len(tensors) - 10} more" in out


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "gpt2", "hidden_size": None}, "model_type 'gpt2' is not supported"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"num_attention_heads": 7}, "config.json: "),
        ({"num_hidden_layers": 3}, "which the config needs"),
        ({"num_hidden_layers": 1}, "is not part of a llama model of 1 layers"),
        ({"vocab_size": 260}, "has shape"),
        ({"attention_bias": True}, "which the config needs"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rotary settings disagree"),
    ],
)
def test_what_the_server_would_not_load_is_not_verified(
    keys: dict[str, Any], reason: str, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (served / "conversion_report.json").unlink()
    assert main_verify([str(served)]) == 0
    assert "nothing contradicts it, but there is no report" in capsys.readouterr().out
    edit(served / "config.json", **keys)
    assert main_verify([str(served)]) == 1
    error = capsys.readouterr().err
    assert reason in error and len(error.splitlines()) == 1


def test_a_weight_that_is_no_number_is_not_verified(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (served / "conversion_report.json").unlink()
    tensors = load_file(served / FILE)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, served / FILE)
    assert main_verify([str(served)]) == 1
    assert "'model.norm.weight' holds NaN or inf" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "reason"), [("model.safetensors", "is not a model folder"), ("no", "no such folder")])
def test_verify_wants_a_folder(name: str, reason: str, served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_verify([str(served / name)]) == 1
    error = capsys.readouterr().err
    assert reason in error and "Errno" not in error
