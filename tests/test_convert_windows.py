"""Sliding windows through the proof: every variant that is served is read as transformers reads it, kept or refused.

A window that is longer than the text of a proof does not show in its logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.__main__ import main_verify
from convert.detect import open_source
from convert.errors import ConvertError
from convert.export import export
from convert.forward import logits
from convert.pipeline import convert
from convert.readings import source_reading
from convert.recheck import verify_folder
from model.config import load_config
from tests.conftest import BASE_CONFIG, KINDS, random_tensors
from tests.convert_sources import write_gguf
from tests.test_convert_export import plain_folder
from tests.test_decoder import Session, load, reference_logits, save_model, some_tokens

SLIDING, FULL = "sliding_attention", "full_attention"
SWITCHED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4000}
VARIANTS: list[tuple[str, dict[str, Any], tuple[int | None, int | None]]] = [
    ("llama", {"sliding_window": 4000}, (None, None)),
    ("mistral", {"sliding_window": 4000}, (4000, 4000)),
    ("mistral", {"sliding_window": None}, (None, None)),
    ("mistral", {"sliding_window": 4000, "layer_types": [FULL, SLIDING]}, (None, 4000)),
    ("phi3", {"sliding_window": 4000}, (4000, 4000)),
    ("phi3", {}, (None, None)),
    ("qwen2", {"sliding_window": 4000, "max_window_layers": 0}, (None, None)),
    ("qwen2", SWITCHED, (None, None)),
    ("qwen2", SWITCHED | {"max_window_layers": 1}, (None, 4000)),
    ("qwen2", SWITCHED | {"layer_types": [SLIDING, FULL]}, (4000, None)),
    ("qwen3", SWITCHED | {"max_window_layers": 0}, (4000, 4000)),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
]


def pickled(folder: Path, kind: str, keys: dict[str, Any]) -> Path:
    """A source that has to be converted, of a family of Hugging Face."""
    config = BASE_CONFIG | KINDS[kind] | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}
    config = {key: value for key, value in config.items() if key != "sliding_window"} | keys
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(random_tensors(config), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(("kind", "keys", "want"), VARIANTS)
def test_every_variant_is_kept_and_proven(
    kind: str, keys: dict[str, Any], want: tuple[int | None, int | None], tmp_path: Path
) -> None:
    report = convert(pickled(tmp_path / "bin", kind, keys), tmp_path / "out")
    assert report is not None
    windowed = sum(window is not None for window in want)
    assert report["proof"]["windows"]["passed"] and report["proof"]["windows"]["windowed"] == windowed
    assert source_reading(open_source(tmp_path / "out")).dimensions.windows == want
    assert load_config(tmp_path / "out").windows == want


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral", {}),
        ("phi3_window_tied", {}),
        ("qwen2_mixed_windows", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL]}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("llama", {"sliding_window": 5}),
    ],
)
def test_the_proofs_own_reading_and_the_decoder_see_what_transformers_sees(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    tokens = some_tokens(40)
    want = reference_logits(save_model(kind, tmp_path, **more), tokens)
    proof = torch.from_numpy(logits(source_reading(open_source(tmp_path)), tokens))
    assert (proof - want).abs().max() < 1e-4
    assert (Session(load(tmp_path)).feed({"a": tokens})["a"] - want).abs().max() < 1e-4


def test_layers_of_a_mistral_by_name(tmp_path: Path) -> None:
    """transformers' own Mistral overlooks layer_types: the two readings here are held to each other."""
    save_model("mistral", tmp_path, sliding_window=5)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": [SLIDING, FULL]}))
    tokens = some_tokens(40)
    proof = torch.from_numpy(logits(source_reading(open_source(tmp_path)), tokens))
    assert (Session(load(tmp_path)).feed({"a": tokens})["a"] - proof).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"layer_types": [FULL, SLIDING]}, "DISAGREE in layer 0: 4000 tokens in the source, no window in the result"),
        ({"sliding_window": 3999}, "DISAGREE in layer 1: 4000 tokens in the source, 3999 tokens in the result"),
    ],
)
def test_a_window_that_no_logit_shows_is_refused(
    keys: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = 0 if "layer_types" in keys else 1
    source = pickled(tmp_path / "bin", "qwen3", SWITCHED | {"max_window_layers": first})
    convert(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    proof = verify_folder(tmp_path / "out", source).proof
    assert proof.logits is not None and proof.logits.passed
    assert f"sliding windows of source and result {line}" in str(proof.refusal())
    assert main_verify([str(tmp_path / "out"), "--against", str(source)]) == 1
    assert f"sliding windows of source and result: {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "to", "keys", "reason"),
    [
        ("qwen2", "gguf", SWITCHED | {"max_window_layers": 0}, "GGUF's qwen2 has no key for sliding windows: --to hf"),
        ("qwen3", "gguf", SWITCHED | {"max_window_layers": 1}, "no key for sliding windows in some of the layers only"),
        ("mistral", "gguf", {"layer_types": [FULL, SLIDING]}, "no key for sliding windows in some of the layers only"),
        ("mistral", "meta", {"layer_types": [FULL, SLIDING]}, "windows in some of the layers only"),
        ("mistral", "llama2c", {"head_dim": 8}, "llama2.c implies no sliding window"),
    ],
)
def test_windows_that_a_format_cannot_say_are_refused(
    kind: str, to: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = plain_folder(tmp_path / "hf", kind, **keys)
    with pytest.raises(ConvertError, match=reason):
        export(folder, tmp_path / "there", to)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("to", ["gguf", "meta"])
def test_a_window_that_is_only_a_familys_default_is_written_out(to: str, tmp_path: Path) -> None:
    """A mistral without the key has one of 4,096 tokens."""
    folder = plain_folder(tmp_path / "hf", "mistral")
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    export(folder, tmp_path / "there", to)
    convert(tmp_path / "there", tmp_path / "home")
    assert load_config(tmp_path / "home").windows == (4096, 4096) == load_config(folder).windows


def test_windows_that_a_switch_turns_off_stop_nothing(tmp_path: Path) -> None:
    export(plain_folder(tmp_path / "hf", "qwen2", sliding_window=9, max_window_layers=0), tmp_path / "a.gguf", "gguf")
    assert source_reading(open_source(tmp_path / "a.gguf")).dimensions.windows == (None, None)


def test_a_window_in_a_gguf_that_its_runtime_overlooks_is_refused(tmp_path: Path) -> None:
    config = BASE_CONFIG | KINDS["qwen2"] | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}
    extra = {"qwen2.attention.sliding_window": 16}
    path = write_gguf(tmp_path / "a.gguf", config, random_tensors(config), "qwen2", extra=extra)
    with pytest.raises(ConvertError, match="windows of qwen2 are not supported"):
        convert(path, tmp_path / "out")


def test_verify_against_another_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(pickled(tmp_path / "bin", "llama", {}), tmp_path / "out")
    other = plain_folder(tmp_path / "other")
    assert main_verify([str(tmp_path / "out"), "--against", str(other)]) == 1
    assert "vocab_size is 40, and 259 in" in capsys.readouterr().err
