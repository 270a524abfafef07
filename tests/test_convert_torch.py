"""Pickled checkpoints: Meta's folders in every cut, and pickles that must not run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.detect import open_source
from convert.errors import ConvertError
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.pipeline import convert
from tests.conftest import BASE_CONFIG, random_tensors
from tests.convert_sources import meta_params, meta_tensors

CONFIG = BASE_CONFIG | {"vocab_size": 40, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}
COLUMNS = ("attention.wo", "feed_forward.w2")
ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3", "output")


def write_meta(folder: Path, ranks: int = 1, embedding_dim: int = 0, **params: Any) -> dict[str, torch.Tensor]:
    """A Meta folder cut into model-parallel ranks; returns the Hugging Face tensors that it stands for."""
    tensors = random_tensors(CONFIG)
    folder.mkdir(exist_ok=True)
    whole = meta_tensors(CONFIG, tensors)
    for rank in range(ranks):
        part = {name: cut(name, tensor, rank, ranks, embedding_dim) for name, tensor in whole.items()}
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(meta_params(CONFIG) | params))
    return tensors


def cut(name: str, tensor: torch.Tensor, rank: int, ranks: int, embedding_dim: int) -> torch.Tensor:
    """With more ranks than key heads, neighbouring ranks hold the same key head."""
    if name.startswith("tok_embeddings"):
        return tensor.chunk(ranks, embedding_dim)[rank].clone()
    if any(part in name for part in COLUMNS):
        return tensor.chunk(ranks, 1)[rank].clone()
    if any(part in name for part in ROWS):
        heads = min(ranks, CONFIG["num_key_value_heads"]) if "wk" in name or "wv" in name else ranks
        return tensor.chunk(heads, 0)[rank * heads // ranks].clone()
    return tensor.clone()


def assert_converts(folder: Path, tensors: dict[str, torch.Tensor], out: Path) -> None:
    report = convert(folder, out)
    assert report is not None and report["proof"]["logits"]["passed"]
    got = load_file(out / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []


@pytest.mark.proves(format="Meta", architecture="llama")
@pytest.mark.parametrize(("ranks", "embedding_dim"), [(1, 0), (2, 0), (2, 1), (4, 0), (8, 1)])
def test_shards_are_joined_whatever_the_cut(ranks: int, embedding_dim: int, tmp_path: Path) -> None:
    """Up to four ranks for each of the two key heads."""
    tensors = write_meta(tmp_path / "meta", ranks, embedding_dim)
    assert_converts(tmp_path / "meta", tensors, tmp_path / "out")


@pytest.mark.proves(format="Mistral", architecture="mistral")
def test_mistral_native_files(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    folder = tmp_path / "native"
    folder.mkdir()
    save_file(meta_tensors(CONFIG, tensors), folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(meta_params(CONFIG) | {"sliding_window": 16}))
    assert_converts(folder, tensors, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta", 2)
    shard = tmp_path / "meta" / "consolidated.01.pth"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConvertError, match=r"consolidated\.01\.pth: not a sound zip archive"):
        open_source(tmp_path / "meta")
    shard.unlink()
    with pytest.raises(ConvertError, match=r"the config needs|the tensors say"):
        convert(tmp_path / "meta", tmp_path / "out")


def test_checklist_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "meta"
    tensors = write_meta(folder)
    shard = folder / "consolidated.00.pth"
    good = hashlib.md5(shard.read_bytes(), usedforsecurity=False).hexdigest()
    (folder / "checklist.chk").write_text(f"{good}  consolidated.00.pth\n")
    assert_converts(folder, tensors, tmp_path / "out")
    (folder / "checklist.chk").write_text(f"{'0' * 32}  consolidated.00.pth\n")
    with pytest.raises(ConvertError, match=r"checklist\.chk says 0000"):
        open_source(folder)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"moe": {"num_experts": 8}}, "'moe'"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "'quantization'"),
        ({"hidden_dim": 99}, "hidden_dim is 99, the tensors say 80"),
        ({"n_heads": None}, "n_heads is None"),
        ({"tied_embeddings": True}, "output.weight differs"),
        ({"dim": 64}, "the config needs"),
    ],
)
def test_params_that_do_not_fit_are_refused(params: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_meta(tmp_path / "meta", **params)
    with pytest.raises(ConvertError, match=reason):
        convert(tmp_path / "meta", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scaled_rope_is_written_with_the_guess_named(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta", use_scaled_rope=True, rope_theta=500000.0)
    report = convert(tmp_path / "meta", tmp_path / "out")
    assert report is not None
    rope = report["config"]["rope_parameters"]
    assert rope["value"]["factor"] == 8.0 and "the factor is not in the file" in rope["from"]


def test_an_equal_head_is_tied_and_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "meta"
    write_meta(folder)
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    torch.save(state, folder / "consolidated.00.pth")
    report = convert(folder, tmp_path / "out")
    assert report is not None
    assert report["not_used"] == [{"source": "output.weight", "reason": "equals tok_embeddings.weight"}]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


# ---- the archive itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_views_and_types_read_as_torch_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = {"whole": base, "turned": base.T, "part": base[1:4, 2:6], "parameter": torch.nn.Parameter(base[2])}
    torch.save(state, tmp_path / "a.pth")
    table = state_tensors(tmp_path / "a.pth", read_torch(tmp_path / "a.pth"))
    for name, tensor in state.items():
        want = tensor.detach().contiguous()
        bits = want.view(torch.int16) if dtype == torch.bfloat16 else want
        got = np.ascontiguousarray(table[name].read())
        assert got.tobytes() == bits.numpy().tobytes(), name


@dataclass(frozen=True)
class RunsCode:
    proof: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("where", ["value", "list"])
def test_a_pickle_that_would_run_code_is_refused_by_name(where: str, tmp_path: Path) -> None:
    proof = tmp_path / "must-not-exist"
    bad: Any = RunsCode(proof) if where == "value" else [RunsCode(proof)]
    path = rewrite(tmp_path, pickle.dumps({"tok_embeddings.weight": bad}, protocol=2))
    with pytest.raises(ConvertError, match=r"a\.pth: the pickle asks for (posix|nt)\.system: refused"):
        read_torch(path)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["builtins eval", "torch load", "collections Counter", "torch._utils _rebuild"])
def test_only_names_on_the_list_are_known(name: str, tmp_path: Path) -> None:
    module, attribute = name.split()
    path = rewrite(tmp_path, b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b".")
    with pytest.raises(ConvertError, match="refused, it could run code"):
        read_torch(path)


def rewrite(folder: Path, data: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """A torch archive with another pickle."""
    with zipfile.ZipFile(folder / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", data, method)
    return folder / "a.pth"


def test_compressed_pickles_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    path = rewrite(tmp_path, b"0" * 100_000_000, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(ConvertError, match="uncompressed data"):
        read_torch(path)


def test_damage_anywhere_is_one_error(tmp_path: Path) -> None:
    """Every byte near a structure replaced in turn: it reads the same names or raises ConvertError."""
    path = tmp_path / "a.pth"
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, path)
    whole = path.read_bytes()
    outcomes = set()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            for tensor in state_tensors(path, read_torch(path)).values():
                tensor.read()
            outcomes.add("read")
        except ConvertError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
