"""The header reader against files that the gguf package writes, split files, and damage of every kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.errors import ConvertError
from convert.formats.gguf_header import read_header
from convert.formats.gguf_parts import read_headers
from convert.pipeline import convert
from model.config import load_config
from model.safetensors_header import WeightsError
from server.plan.source import open_model
from tests.conftest import BASE_CONFIG, random_tensors
from tests.convert_sources import write_gguf as whole_gguf
from tests.test_weights import load


def write_gguf(path: Path, **changes: Any) -> Path:
    """A llama with every kind of metadata and two tensors a layer; None drops a key."""
    fields = {
        "llama.embedding_length": 32, "llama.feed_forward_length": 64, "llama.block_count": 2,
        "llama.context_length": 256, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    } | changes  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["", "a", "ü", "x" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_vocabularies_and_tensors_are_read(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf"))
    assert header.metadata["llama.context_length"] == 256
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == ["", "a", "ü", "x" * 300]
    assert header.metadata["tokenizer.ggml.scores"] == (0.5,) * 5000
    found = {row.name: (row.shape, row.type_code) for row in header.tensors}
    assert found == {
        "token_embd.weight": ((40, 32), 0),
        "blk.0.attn_q.weight": ((32, 32), 1),
        "blk.0.attn_norm.weight": ((32,), 0),
    }


def test_a_truncated_header_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    end = whole.index(b"blk.0.attn_norm.weight") + 22 + 4 + 8 + 4 + 8  # name, dimensions, one length, type, offset
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 400), *range(end - 80, end)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConvertError, match=r"cut\.gguf"):
            read_header(path)
    path.write_bytes(whole[:end])
    assert len(read_header(path).tensors) == 3


@pytest.mark.parametrize(
    ("at", "raw", "words"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, (1).to_bytes(4, "little"), "GGUF version 1"),
        (4, (3).to_bytes(4, "big"), "GGUF version 50331648"),
        (24, (1 << 62).to_bytes(8, "little"), "metadata key needs 4611686018427387904 bytes"),
    ],
)
def test_what_is_not_gguf_is_refused_with_the_reason(tmp_path: Path, at: int, raw: bytes, words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    path.write_bytes(data)
    with pytest.raises(ConvertError, match=words):
        read_header(path)


def test_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", **{"split.count": 2, "split.no": 0})
    with pytest.raises(ConvertError, match=r"part m-00002-of-00002\.gguf of the model is missing"):
        read_headers(first)
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", **{"split.count": 2, "split.no": 1})
    with pytest.raises(ConvertError, match=r"m-00002-of-00002\.gguf at byte \d+: .* appears twice"):
        read_headers(first)
    second.write_bytes(renamed_tensors(second.read_bytes()))
    assert [len(header.tensors) for header in read_headers(first)] == [3, 3]
    lone = first.rename(tmp_path / "m.gguf")
    with pytest.raises(ConvertError, match="must keep their names"):
        read_headers(lone)


def renamed_tensors(raw: bytes) -> bytes:
    """The same file with other tensor names of the same length."""
    return raw.replace(b"token_embd.weight", b"other_embd.weight").replace(b"blk.0.", b"blk.1.")


def of_model(path: Path, **extra: Any) -> Path:
    """A whole model of two layers."""
    config = BASE_CONFIG | {"vocab_size": 40, "tie_word_embeddings": True}
    return whole_gguf(
        path, config, random_tensors(config), extra={f"llama.{key}": value for key, value in extra.items()}
    )


def test_a_plan_of_a_gguf_is_of_what_is_served(tmp_path: Path) -> None:
    """Sizes, windows and scaling: a plan knows no GGUF of its own, it asks the converter."""
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    path = of_model(tmp_path / "m.gguf", **scaling, **{"attention.sliding_window": 64})
    planned = open_model(str(path))
    convert(path, tmp_path / "out")
    served = load_config(tmp_path / "out")
    assert (planned.config, planned.serve_as) == (served, str(path))
    assert planned.config.windows == (64, 64) and planned.config.longest_context == 512
    written = {tensor.name: tensor.elements for tensor in open_model(str(tmp_path / "out")).tensors}
    assert {tensor.name: tensor.elements for tensor in planned.tensors} == written


def test_a_gguf_that_is_no_model_is_refused(tmp_path: Path, shared_data: Path) -> None:
    with pytest.raises(ConvertError, match=r"m\.gguf: metadata llama\.attention\.layer_norm_rms_epsilon: missing"):
        open_model(str(write_gguf(tmp_path / "m.gguf")))
    vocabulary = shared_data / "tokenizers" / "ggml-vocab-gpt-2.gguf"
    with pytest.raises(ConvertError, match="GGUF architecture 'gpt2' is not supported"):
        open_model(str(vocabulary))


def test_safetensors_folders_with_damage_are_refused(tmp_path: Path, tiny_model: Any) -> None:
    config = (tiny_model() / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ConvertError, match=r"2 of 2 files are missing: copy one\.safetensors again"):
        open_model(str(tmp_path))
    index.write_text("[]")
    with pytest.raises(ConvertError, match="not a JSON object but a list"):
        open_model(str(tmp_path))
    index.unlink()
    weights = tmp_path / "model.safetensors"
    for raw, words in ((b"", "not safetensors"), (b"\x10" + bytes(7) + b"{", "cut short")):
        weights.write_bytes(raw)
        with pytest.raises(ConvertError, match=words):
            open_model(str(tmp_path))


def damaged(source: Path, folder: Path, damage: str) -> Path:
    """A copy whose headers show that it cannot be served."""
    shutil.copytree(source, folder)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "too long":
        weights.write_bytes(weights.read_bytes() + bytes(100))
    elif damage == "type":
        raw = weights.read_bytes()
        weights.write_bytes(raw.replace(b'"F32"', b'"F13"', 1))
    elif damage == "shape":
        config["vocab_size"] += 1
        (folder / "config.json").write_text(json.dumps(config))
    elif damage == "missing":
        save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, weights)
    elif damage == "too many":
        save_file(tensors | {"other": np.zeros(1, np.float32)}, weights)
    elif damage == "integers":
        save_file(tensors | {"model.norm.weight": np.zeros(tensors["model.norm.weight"].shape, np.int32)}, weights)
    elif damage == "wrong file":
        names = sorted(tensors)
        weights.rename(folder / "a.safetensors")
        save_file({}, folder / "b.safetensors")
        places = dict.fromkeys(names, "a.safetensors") | {names[0]: "b.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("none", None), ("cut", "its header promises"), ("too long", "its header promises"),
        ("type", "is F13, expected one of F64, F32, F16, BF16"), ("shape", "config.json asks for"),
        ("missing", "no file holds tensor model.norm.weight"), ("too many", "no use for tensor other"),
        ("integers", "model.norm.weight is I32, expected one of"), ("wrong file", "places in b.safetensors"),
    ],
)  # fmt: skip
def test_a_plan_warns_of_exactly_what_the_loader_refuses(
    damage: str, words: str | None, tmp_path: Path, tiny_model: Any
) -> None:
    folder = damaged(tiny_model(), tmp_path / "model", damage)
    warning = open_model(str(folder)).warning
    if words is None:
        assert warning is None
        load(folder)
        return
    assert warning is not None and words in warning
    with pytest.raises(WeightsError, match=r"F13|promises|shape|lacks|no use|I32|places"):
        load(folder)
