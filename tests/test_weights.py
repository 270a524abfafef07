"""Loading checkpoints: whole, sharded, tied; and every way they can be broken, named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import load_config
from model.decoder import Decoder
from model.ops.reference import ReferenceOps
from model.safetensors_header import WeightsError
from model.weights import load_decoder

Factory = Callable[..., Path]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Factory, tmp_path: Path) -> Path:
    """A copy of the tiny llama that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, load_config(folder), ReferenceOps(), "cpu", dtype)


def edit(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; names carry __ for dots."""
    path = folder / "model.safetensors"
    kept = load_file(path)
    for key, tensor in tensors.items():
        kept.pop(key.replace("__", "."), None)
        if tensor is not None:
            kept[key.replace("__", ".")] = tensor
    save_file(kept, path)


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two files with an index; returns tensor -> file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed: dict[str, str] = {}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return placed


def same_weights(one: Decoder, other: Decoder) -> bool:
    x = torch.eye(one.config.hidden_size)
    pairs = [(one.embedding, other.embedding), (one.logits(x), other.logits(x))]
    for a, b in zip(one.layers, other.layers, strict=True):
        pairs.append((one.ops.linear(x, a.attention.qkv), other.ops.linear(x, b.attention.qkv)))
        pairs.append((one.ops.linear(x, a.mlp.gate_up), other.ops.linear(x, b.mlp.gate_up)))
    return all(torch.equal(left, right) for left, right in pairs)


def test_fused_rows_are_in_order(folder: Path) -> None:
    tensors, decoder = load_file(folder / "model.safetensors"), load(folder)
    x = torch.eye(48)
    parts = [tensors[K_PROJ.replace("k_proj", f"{name}_proj")] for name in "qkv"]
    torch.testing.assert_close(decoder.ops.linear(x, decoder.layers[1].attention.qkv), torch.cat(parts).T)


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    assert same_weights(load(folder), whole)


def test_progress_reaches_its_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = load_config(folder)
    load_decoder(folder, config, ReferenceOps(), "cpu", torch.float32, progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]


def test_the_rotary_table_can_be_cut(folder: Path) -> None:
    config = load_config(folder)
    decoder = load_decoder(folder, config, ReferenceOps(), "cpu", torch.float32, max_positions=17)
    assert decoder.cos_sin.shape == (17, config.rotary_dim)


def test_rotary_frequencies_in_the_file_are_harmless(folder: Path) -> None:
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(folder)


def test_tied_head_is_the_embedding(tiny_model: Factory) -> None:
    decoder = load(tiny_model("llama", tie_word_embeddings=True))
    torch.testing.assert_close(decoder.logits(torch.eye(48)), decoder.embedding.T)
    assert decoder.warnings == ()


def test_a_tied_config_with_a_head_of_its_own(tiny_model: Factory, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama", tie_word_embeddings=True), tmp_path / "tied"))
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    edit(folder, lm_head__weight=embedding.clone())
    assert load(folder).warnings == ()
    edit(folder, lm_head__weight=embedding + 1)
    decoder = load(folder)
    assert "lm_head.weight differs" in decoder.warnings[0]
    torch.testing.assert_close(decoder.logits(torch.eye(48)), embedding.T + 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: None}, f"lacks tensor {NORM} [48]"),
        ({HEAD: None}, f"lacks tensor {HEAD}"),
        ({K_PROJ: torch.zeros(8, 48)}, f"tensor {K_PROJ} has shape [8, 48], config.json asks for [16, 48]"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, "no use for tensor model.layers.0.self_attn"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}, "no use for tensor model.layers.2"),
        ({NORM: torch.full((48,), torch.nan)}, f"tensor {NORM} holds NaN or infinity as float32"),
        ({NORM: torch.ones(48, dtype=torch.int8)}, f"tensor {NORM} is I8, expected one of"),
    ],
)
def test_wrong_tensors(tensors: dict[str, Tensor | None], message: str, folder: Path) -> None:
    edit(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    with pytest.raises(WeightsError) as error:
        load(folder)
    assert message in str(error.value)


def test_values_that_only_the_chosen_dtype_cannot_hold(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.full((48,), 1e6))
    load(folder)
    with pytest.raises(WeightsError, match="holds NaN or infinity as float16"):
        load(folder, torch.float16)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_short_file(cut: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(WeightsError, match=r"model.safetensors has \d+ bytes, its header promises \d+"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short"),
        (b"\xff" * 8, "cut short"),
        (b"\x02" + bytes(7) + b"[]", r"broken safetensors header: not a JSON object but a list$"),
        (b"\x02" + bytes(7) + b"x}", r"broken safetensors header: not JSON \(Expecting value at character 0\)$"),
        (b"\x07" + bytes(7) + b'{"a":1}', r"header: tensor 'a', 1, has no dtype$"),
        (
            b"\x2d" + bytes(7) + b'{"a":{"dtype":"U8","shape":[-1,2]}, "b": {} }',
            r"tensor 'a', .* whole numbers",
        ),
    ],
)
def test_not_safetensors(content: bytes, message: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_an_empty_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"holds no \*.safetensors"):
        load(folder)


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 2 files are missing: copy model-00002-of-00002\.safetensors again"):
        load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(WeightsError, match="lacks tensor"):
        load(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    placed = shard(folder)
    first, second = sorted(set(placed.values()))
    save_file(load_file(folder / first) | {EMBEDDING: torch.zeros(1), NORM: torch.zeros(1)}, folder / first)
    with pytest.raises(WeightsError, match=f"{first} holds tensor .*, which {INDEX} places in {second}"):
        load(folder)


def test_a_stale_index(folder: Path) -> None:
    placed = shard(folder)
    first, second = sorted(set(placed.values()))
    placed[NORM] = first if placed[NORM] == second else second
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    other = second if placed[NORM] == first else first
    with pytest.raises(WeightsError, match=f"{other} holds tensor {NORM}, which {INDEX} places in {placed[NORM]}"):
        load(folder)


def test_a_tensor_that_only_the_index_knows(folder: Path) -> None:
    placed = shard(folder)
    file = placed[NORM]
    (folder / INDEX).write_text(json.dumps({"weight_map": placed | {"ghost": file}}))
    with pytest.raises(WeightsError, match=f"{INDEX} places tensor ghost in {file}, which does not hold it"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no index of files: no weight_map of tensors to files$"),
        ("[", r"no index of files: not JSON \(Expecting value at character 1\)$"),
        ('{"weight_map": {"a": 7}}', "gives tensor a 7, expected the name of a file$"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside the folder"),
    ],
)
def test_a_broken_index(text: str, message: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_quantization_needs_kernels(folder: Path) -> None:
    with pytest.raises(ValueError, match="quantization 'int8' needs native kernels"):
        load_decoder(folder, load_config(folder), ReferenceOps(), "cpu", torch.float32, quantization="int8")
