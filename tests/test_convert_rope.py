"""Scaled and partial rotary positions through every conversion, phi3 among them; a wrong base, which logits hide."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from convert.errors import ConvertError
from convert.export import export
from convert.pipeline import convert
from convert.recheck import verify_folder
from model.config import ModelConfig, load_config
from tests.conftest import BASE_CONFIG, KINDS, random_tensors
from tests.convert_sources import write_gguf
from tests.test_decoder import Session, load, reference_logits, save_model, some_tokens

SHORT, LONG = [1.0, 1.05, 1.1, 1.3], [1.1, 1.9, 3.0, 7.77]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def small(kind: str, **overrides: Any) -> dict[str, Any]:
    return BASE_CONFIG | KINDS[kind] | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40} | overrides


def tables() -> dict[str, NDArray[Any]]:
    factors = {"long": LONG, "short": SHORT}
    return {f"rope_factors_{name}.weight": np.asarray(values, np.float32) for name, values in factors.items()}


def converted(source: Path, out: Path) -> ModelConfig:
    """Converts; the proof must have compared rotary frequencies and logits."""
    report = convert(source, out)
    assert report is not None
    assert report["proof"]["rotation"]["passed"] and report["proof"]["logits"]["passed"]
    return load_config(out)


# ---- GGUF ---------------------------------------------------------------------------------------------------


@pytest.mark.proves(format="GGUF", architecture="phi3")
@pytest.mark.parametrize("tied", [True, False])
def test_phi3_from_gguf(tied: bool, tmp_path: Path) -> None:
    """Partial rotary, a window, and zero for none where the exporter writes it."""
    config = small("phi3", head_dim=16, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    extra = {"phi3.rope.dimension_count": 12, "phi3.attention.sliding_window": 16 if tied else 0}
    extra |= {"phi3.rope.scaling.original_context_length": 512}
    ours = converted(write_gguf(tmp_path / "a.gguf", config, tensors, "phi3", extra=extra), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    assert (ours.model_type, ours.rotary_dim, ours.windows) == ("phi3", 12, (16 if tied else None,) * 2)


@pytest.mark.parametrize("attention", [None, 1.5])
def test_longrope_tables_of_a_gguf(attention: float | None, tmp_path: Path) -> None:
    config = small("phi3")
    scale = (1 + np.log(512 / 64) / np.log(64)) ** 0.5 if attention is None else attention
    extra = {"phi3.rope.scaling.attn_factor": float(scale), "phi3.rope.scaling.original_context_length": 64}
    path = write_gguf(tmp_path / "a.gguf", config, random_tensors(config), "phi3", extra=extra, more_tensors=tables())
    rope = converted(path, tmp_path / "out").rope
    assert (rope.kind, rope.short_factor, rope.long_factor) == ("longrope", tuple(SHORT), tuple(LONG))
    assert rope.attention_factor == pytest.approx(scale, rel=1e-6)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("attention_factor" in written["rope_parameters"]) is (attention is not None)


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"factor": 1.0}, None),
        ({"type": "none", "factor": 2.0}, None),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True}, YARN),
        ({"type": "yarn", "factor": 4.0}, YARN | {"original_max_position_embeddings": 512}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 8.0},
            YARN | {"beta_fast": 8.0},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_log_multiplier": 0.5},
            YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_attn_factor": 1.25},
            YARN | {"attention_factor": 1.25},
        ),
    ],
)
def test_scaling_keys_of_a_gguf_are_kept(keys: dict[str, Any], want: dict[str, Any] | None, tmp_path: Path) -> None:
    extra = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "a.gguf", small("llama"), random_tensors(small("llama")), extra=extra)
    rope = converted(path, tmp_path / "out").rope
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_scaling"] == want
    assert rope.kind == ("default" if want is None else want["rope_type"])


ORIGINAL, ONES = "rope.scaling.original_context_length", np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("extra", "more", "reason"),
    [
        ({"rope.scaling.type": "longrope"}, {}, "'longrope' is not supported without its tensors"),
        ({}, {"rope_factors_long.weight": ONES}, "original_context_length: missing"),
        ({ORIGINAL: 64}, {"rope_factors_long.weight": ONES}, "rope_factors_short.weight is missing"),
        ({ORIGINAL: 64}, {**tables(), "rope_factors_long.weight": ONES[:3]}, r"long\.weight F32 \(3,\) does not fit"),
        ({ORIGINAL: 64, "rope.scaling.type": "yarn"}, tables(), "does not go with"),
        ({"rope.dimension_count": 3}, {}, "3 is odd or more than head_dim 8"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
            {},
            "only 1 is supported",
        ),
        ({"rope.scaling.alpha": 2.0}, {}, "alpha = 2.0 is not understood"),
    ],
)
def test_scaling_that_cannot_be_served_is_refused_when_converting(
    extra: dict[str, Any], more: dict[str, NDArray[Any]], reason: str, tmp_path: Path
) -> None:
    config, extra = small("phi3"), {f"phi3.{key}": value for key, value in extra.items()}
    path = write_gguf(tmp_path / "a.gguf", config, random_tensors(config), "phi3", extra=extra, more_tensors=more)
    with pytest.raises(ConvertError, match=reason):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_internlm2_of_a_gguf_is_a_llama(tmp_path: Path) -> None:
    config = small("llama")
    tensors = random_tensors(config)
    ours = converted(write_gguf(tmp_path / "a.gguf", config, tensors, "internlm2"), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    assert ours.model_type == "llama"


# ---- Hugging Face, there and back ---------------------------------------------------------------------------


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), folder / "model.safetensors")
    return folder


@pytest.mark.proves(format="GGUF", architecture="{kind}")
@pytest.mark.proves(format="to gguf", architecture="{kind}")
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen2", {"rope_scaling": {**YARN, "finetuned": True}}),
        ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 5e5, "attention_factor": 1.25}, "rope_theta": 5e5}),
        ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0}}),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"type": "su", "rope_type": None}, "original_max_position_embeddings": 64},
        ),
        ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 16}),
        ("llama", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64, "attention_factor": 1.5}}),
    ],
)
def test_there_and_back_through_gguf(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", small(kind, **keys))
    export(folder, tmp_path / "there.gguf", "gguf")
    ours, want = converted(tmp_path / "there.gguf", tmp_path / "home"), load_config(folder)
    assert (ours.rope, ours.windows, ours.model_type) == (want.rope, want.windows, kind)
    got, tensors = load_file(tmp_path / "home" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []


@pytest.mark.parametrize("kind", ["phi3_longrope", "phi3_window_tied", "llama_yarn"])
def test_transformers_reads_what_came_back_as_the_model_it_was(kind: str, tmp_path: Path) -> None:
    """The outside judge of config.json: tensors may be right and its keys lost."""
    model, tokens = save_model(kind, tmp_path / "hf"), some_tokens(100)
    export(tmp_path / "hf", tmp_path / "there.gguf", "gguf")
    converted(tmp_path / "there.gguf", tmp_path / "home")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(model).from_pretrained(tmp_path / "home", attn_implementation="eager", pad_token_id=0)
    assert (reference_logits(again.float(), tokens) - reference_logits(model, tokens)).abs().max() < 1e-5
    logits = Session(load(tmp_path / "home")).feed({"a": tokens})["a"]
    assert (logits - reference_logits(model, tokens)).abs().max() < 1e-4


def test_transformers_reads_the_gguf_of_a_phi3(tmp_path: Path) -> None:
    """Another reader of the format judges names and layout (it knows nothing of windows or of longrope)."""
    model, tokens = save_model("phi3", tmp_path / "hf"), some_tokens(60)
    export(tmp_path / "hf", tmp_path / "there.gguf", "gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = {"gguf_file": "there.gguf", "attn_implementation": "eager", "dtype": torch.float32, "pad_token_id": 0}
        again = type(model).from_pretrained(tmp_path, **read)
    assert torch.equal(reference_logits(again, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize(
    ("to", "keys", "reason"),
    [
        ("gguf", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "cannot hold rope scaling"),
        ("gguf", {"rope_scaling": {**YARN, "truncate": False}}, "cannot hold rope scaling"),
        ("gguf", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}, "cannot hold rope scaling"),
        ("gguf", {"partial_rotary_factor": 0.5}, "refuses a GGUF llama of which 4 of 8 channels.*: --to hf keeps it"),
        ("meta", {"partial_rotary_factor": 0.5}, "turns whole heads"),
        ("llama2c", {"partial_rotary_factor": 0.5}, "whole heads that turn"),
    ],
)
def test_what_a_format_cannot_say_is_refused(to: str, keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", small("llama", hidden_size=48, **keys))
    with pytest.raises(ConvertError, match=reason):
        export(folder, tmp_path / "there", to)


@pytest.mark.proves(format="Hugging Face .bin", architecture="phi3")
@pytest.mark.parametrize("keys", [{"partial_rotary_factor": 0.5}, {"rope_scaling": {**LONGROPE, "long_factor": LONG}}])
def test_pickled_phi3_keeps_its_rotary_settings(keys: dict[str, Any], tmp_path: Path) -> None:
    config = small("phi3", original_max_position_embeddings=64, **keys)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(random_tensors(config), folder / "pytorch_model.bin")
    assert converted(folder, tmp_path / "out").rope == ModelConfig.from_dict(config).rope


def test_a_wrong_base_is_refused_where_logits_hardly_differ(tmp_path: Path) -> None:
    config = small("llama", rope_theta=10000.0)
    path = write_gguf(tmp_path / "a.gguf", config, random_tensors(config))
    converted(path, tmp_path / "out")
    changed = json.loads((tmp_path / "out" / "config.json").read_text())
    changed["rope_theta"] = changed["rope_parameters"]["rope_theta"] = 10100.0
    (tmp_path / "out" / "config.json").write_text(json.dumps(changed))
    proof = verify_folder(tmp_path / "out", path).proof
    assert proof.rotation is not None and not proof.rotation.passed
    assert "rotary frequencies of source and result DISAGREE" in str(proof.refusal())


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_a_gguf_that_llama_cpp_would_not_load_is_not_written(kind: str, tmp_path: Path) -> None:
    """Its loader and its graphs take parts of heads that turn for phi3 alone (of what is served here)."""
    folder = folder_of(tmp_path / "hf", small(kind, partial_rotary_factor=0.5))
    with pytest.raises(ConvertError, match="4 of 8 channels of a head turn"):
        export(folder, tmp_path / "there.gguf", "gguf")


@pytest.mark.parametrize("arch", ["llama", "internlm2"])
def test_nor_is_one_read(arch: str, tmp_path: Path) -> None:
    config, extra = small("llama"), {f"{arch}.rope.dimension_count": 4}
    path = write_gguf(tmp_path / "a.gguf", config, random_tensors(config), arch, extra=extra)
    with pytest.raises(ConvertError, match=rf"rope\.dimension_count: differs from head_dim 8: .* no such {arch}"):
        convert(path, tmp_path / "out")
