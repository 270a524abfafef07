"""A Hugging Face folder made anew: sharded, rounded on request, without what old files carry; else the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.__main__ import main_convert
from convert.errors import ConvertError
from convert.export import export
from model.config import load_config
from tests.test_convert_export import plain_folder

ROPE_TABLE = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.proves(format="to hf", architecture="{kind}")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_every_model_goes_to_a_folder_of_its_own_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """With a RoPE table of old files, and a tied head that was stored all the same; in shards."""
    folder = plain_folder(tmp_path / "hf", kind, torch.bfloat16, tie_word_embeddings=True, torch_dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), ROPE_TABLE: torch.ones(4)}
    save_file(tensors | more, folder / "model.safetensors")
    assert main_convert([str(folder), str(tmp_path / "out"), "--to", "hf", "--max-shard-size", "50KiB"]) == 0
    shards = list((tmp_path / "out").glob("*.safetensors"))
    got = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert got.keys() == tensors.keys() and len(shards) > 1
    bits = torch.int16
    assert [name for name in tensors if not torch.equal(got[name].view(bits), tensors[name].view(bits))] == []
    assert load_config(tmp_path / "out") == load_config(folder)
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert {row["source"]: row["reason"] for row in report["not_used"]} == {
        ROPE_TABLE: "RoPE table, recomputed", "lm_head.weight": "equals model.embed_tokens.weight",
    }  # fmt: skip


def test_a_folder_is_rounded_on_request(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", "phi3")
    assert main_convert([str(folder), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    got, want = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert [name for name in want if not torch.equal(got[name], want[name].bfloat16())] == []
    assert load_config(tmp_path / "out").dtype == "bfloat16"


def test_a_head_of_its_own_beside_tied_embeddings_is_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        export(folder, tmp_path / "there.gguf", "gguf")
