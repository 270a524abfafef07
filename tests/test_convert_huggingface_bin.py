"""Hugging Face folders with pickled weights become safetensors with the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convert.cache import ensure_canonical
from convert.errors import ConvertError
from convert.pipeline import convert
from tests.conftest import ModelFactory


def pickled(tiny_model: ModelFactory, kind: str, folder: Path, shards: int) -> dict[str, torch.Tensor]:
    """The tiny model with its weights pickled, one file or several with an index."""
    source = tiny_model(kind)
    tensors = load_file(source / "model.safetensors")
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    state = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return tensors
    names = list(state)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: state[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.proves(format="Hugging Face .bin", architecture="{kind}")
@pytest.mark.parametrize(("kind", "shards"), [("llama", 1), ("mistral", 1), ("qwen2", 3), ("qwen3", 2)])
def test_values_tokenizer_and_account(kind: str, shards: int, tiny_model: ModelFactory, tmp_path: Path) -> None:
    tensors = pickled(tiny_model, kind, tmp_path / "bin", shards)
    out = ensure_canonical(tmp_path / "bin", tmp_path / "cache")
    got = load_file(out / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (tmp_path / "bin" / name).read_bytes()
    report = json.loads((out / "conversion_report.json").read_text())
    assert [row["reason"] for row in report["not_used"]] == ["RoPE table, recomputed"]


def test_an_index_that_leaves_the_folder_is_refused(tiny_model: ModelFactory, tmp_path: Path) -> None:
    pickled(tiny_model, "llama", tmp_path / "bin", 2)
    index = tmp_path / "bin" / "pytorch_model.bin.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = next(iter(weight_map))
    index.write_text(json.dumps({"weight_map": weight_map | {first: "../secret.bin"}}))
    with pytest.raises(ConvertError, match=r"outside the folder: '\.\./secret\.bin'"):
        convert(tmp_path / "bin", tmp_path / "out")
