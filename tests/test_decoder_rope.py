"""Which frequencies serve a sequence when the length that is served decides, head ratios, and a split phi3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.test_decoder import Session, load, reference_logits, save_model, some_tokens

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "served", "count"),
    [("phi3_longrope", 64, 64), ("phi3_longrope", 65, 65), ("phi3_longrope", 512, 150), ("llama_longrope", 64, 30)],
)
def test_longrope_in_either_regime(kind: str, served: int, count: int, tmp_path: Path) -> None:
    model, tokens = save_model(kind, tmp_path), some_tokens(count)
    logits = Session(load(tmp_path, max_positions=served)).feed({"a": tokens})["a"]
    assert (logits - reference_logits(model, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(("served", "count"), [(64, 60), (20, 20), (128, 128)])
def test_dynamic_scaling_of_the_length_that_is_served(served: int, count: int, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path, max_position_embeddings=64, rope_parameters=DYNAMIC)
    tokens, decoder = some_tokens(count), load(tmp_path, max_positions=served)
    assert (Session(decoder).feed({"a": tokens})["a"] - reference_logits(model, tokens)).abs().max() < 1e-4
    assert decoder.config.longest_context == 128


@pytest.mark.parametrize("kind", ["phi3_longrope", "llama_yarn"])
def test_what_comes_later_changes_no_key(kind: str, tmp_path: Path) -> None:
    """Across the original context of 64 tokens, in one forward or token by token: the same bits."""
    save_model(kind, tmp_path)
    decoder, tokens = load(tmp_path), some_tokens(70)
    whole = Session(decoder).feed({"a": tokens})["a"]
    steps = Session(decoder)
    assert torch.equal(torch.cat([steps.feed({"a": [token]})["a"] for token in tokens]), whole)
    assert torch.equal(Session(decoder).feed({"a": tokens[:30]})["a"], whole[:30])


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (6, 2), (8, 2), (8, 1), (9, 3)])
def test_every_ratio_of_heads(heads: int, kv_heads: int, tmp_path: Path) -> None:
    tokens = some_tokens(40)
    for kind in ("llama", "phi3_partial"):
        shape = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        model = save_model(kind, tmp_path / kind, **shape)
        logits = Session(load(tmp_path / kind)).feed({"a": tokens})["a"]
        assert (logits - reference_logits(model, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["phi3_partial", "phi3_longrope"])
def test_partial_rotary_of_another_family(kind: str, tmp_path: Path) -> None:
    """transformers gives llama no partial rotary: a phi3 whose matrices are cut apart is one."""
    model, tokens = save_model(kind, tmp_path), some_tokens(90)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    parts = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        cuts = {"qkv_proj": ("qkv", [48, 16, 16]), "gate_up_proj": (("gate", "up"), [80, 80])}.get(name.split(".")[-2])
        if cuts is None:
            parts[name] = tensor
            continue
        for part, rows in zip(cuts[0], torch.split(tensor, cuts[1]), strict=True):
            parts[name.replace(name.split(".")[-2], f"{part}_proj")] = rows.clone()
    save_file(parts, tmp_path / "model.safetensors")
    logits = Session(load(tmp_path)).feed({"a": tokens})["a"]
    assert (logits - reference_logits(model, tokens)).abs().max() < 1e-4


def test_the_operator_is_told_which_factors_serve(tmp_path: Path) -> None:
    save_model("phi3_longrope", tmp_path)
    assert load(tmp_path, max_positions=64).warnings == ()
    assert "the long factors serve every request" in load(tmp_path).warnings[0]
