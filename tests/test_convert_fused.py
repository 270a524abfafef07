"""Formats that keep q, k and v in one tensor: InternLM2, litgpt; and GPT-NeoX, which is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from convert.cache import ensure_canonical
from convert.detect import open_source
from convert.errors import ConvertError
from convert.pipeline import convert
from model.config import load_config
from server.plan.__main__ import main as main_plan
from tests.conftest import BASE_CONFIG, KINDS, random_tensors
from tests.convert_fused_sources import write_internlm2, write_litgpt
from tests.convert_sources import write_llama2c_torch

RATIOS = [(4, 4), (6, 2), (8, 2), (8, 1), (9, 3)]


def small(kind: str = "llama", **overrides: Any) -> dict[str, Any]:
    return BASE_CONFIG | KINDS[kind] | {"intermediate_size": 64, "vocab_size": 40} | overrides


def assert_converts(source: Path, tensors: dict[str, Tensor], out: Path) -> dict[str, Any]:
    report = convert(source, out)
    assert report is not None and report["proof"]["logits"]["passed"] and report["proof"]["rotation"]["passed"]
    got = load_file(out / "model.safetensors")
    assert got.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    return report


# ---- InternLM2 ----------------------------------------------------------------------------------------------


def with_attention_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    more = {name.replace("weight", "bias"): tensor[:, 0].clone() for name, tensor in tensors.items() if "_attn" in name}
    return tensors | more


@pytest.mark.proves(format="InternLM2", architecture="llama")
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_internlm2_by_groups(heads: int, kv_heads: int, tmp_path: Path) -> None:
    config = small(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    config |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e6}
    tensors = random_tensors(config)
    report = assert_converts(write_internlm2(tmp_path / "in", config, tensors), tensors, tmp_path / "out")
    ours = load_config(tmp_path / "out")
    assert (ours.model_type, ours.rope.kind, ours.rope.theta, ours.longest_context) == ("llama", "dynamic", 1e6, 1024)
    assert "auto_map" not in report["config"]
    rows = [row for row in report["tensors"] if row["source"] == "model.layers.1.attention.wqkv.weight"]
    assert [row["transform"] for row in rows] == ["rows of one of q, k, v, by group"] * 3


def test_what_the_converter_reads_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bytes as the folder that serving would make of it."""
    tensors = random_tensors(small())
    sources = [
        write_internlm2(tmp_path / "intern", small(), tensors),
        write_litgpt(tmp_path / "lit", small(), tensors),
        write_llama2c_torch(tmp_path / "ckpt.pt", small(), tensors),
    ]
    for number, source in enumerate(sources):
        convert(source, tmp_path / f"out{number}")
        budgets = []
        for model in (source, tmp_path / f"out{number}"):
            assert main_plan([str(model), "--memory", "2GiB", "--json"]) == 0
            budgets.append(json.loads(capsys.readouterr().out)["budget"])
        assert budgets[0] == budgets[1]


@pytest.mark.parametrize("pickled", [True, False])
def test_internlm2_with_biases_is_converted_before_it_is_served(pickled: bool, tmp_path: Path) -> None:
    tensors = with_attention_biases(random_tensors(small()))
    folder = write_internlm2(tmp_path / "in", small(), tensors, pickled)
    out = ensure_canonical(folder, tmp_path / "cache")
    got = load_file(out / "model.safetensors")
    assert [name for name in tensors if not torch.equal(got[name], tensors[name])] == []
    assert load_config(out).o_bias


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_key_value_heads": 3}, r"wqkv\.weight' \(80, 48\) does not hold 6 \+ 2 \* 3 heads of 8 rows"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected at least 1"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000, expected at most"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type 'ntk' is not supported"),
    ],
)
def test_internlm2_that_does_not_fit_is_refused(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_internlm2(tmp_path / "in", small(), random_tensors(small()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ConvertError, match=reason):
        convert(folder, tmp_path / "out")


# ---- litgpt -------------------------------------------------------------------------------------------------

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_condense_ratio": 2}),
    ("mistral", {"sliding_window_size": 16}),
    ("qwen2", {"attn_bias": True, "rope_base": 1000000}),
    ("qwen3", {"norm_qk": True}),
]


@pytest.mark.proves(format="litgpt", architecture="{kind}")
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(("kind", "params"), FAMILIES)
def test_litgpt_families_in_both_layouts(kind: str, params: dict[str, Any], old: bool, tmp_path: Path) -> None:
    config = small(kind)
    tensors = random_tensors(config)
    assert_converts(write_litgpt(tmp_path / "lit", config, tensors, old, **params), tensors, tmp_path / "out")
    ours = load_config(tmp_path / "out")
    assert ours.model_type == kind
    assert ours.windows == (params.get("sliding_window_size"),) * 2
    assert (ours.rope.kind, ours.rope.factor) == (("linear", 2.0) if kind == "llama" else ("default", 1.0))


@pytest.mark.proves(format="litgpt", architecture="llama")
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_litgpt_by_groups(heads: int, kv_heads: int, tmp_path: Path) -> None:
    config = small(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    tensors = random_tensors(config)
    assert_converts(write_litgpt(tmp_path / "lit", config, tensors, old=True), tensors, tmp_path / "out")


@pytest.mark.proves(format="litgpt", architecture="phi3")
@pytest.mark.parametrize("old", [True, False])
def test_litgpt_phi_with_partial_rotary_is_stacked_again(old: bool, tmp_path: Path) -> None:
    tensors = random_tensors(small())
    folder = write_litgpt(tmp_path / "lit", small(), tensors, old, rotary_percentage=0.75, sliding_window_size=16)
    want = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            want[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [tensor, tensors[name.replace(".gate_", ".up_")]]
            want[name.replace(".gate_", ".gate_up_")] = torch.cat(parts)
        elif not any(f".{part}_proj." in name for part in ("k", "v", "up")):
            want[name] = tensor
    assert_converts(folder, want, tmp_path / "out")
    ours = load_config(tmp_path / "out")
    assert (ours.model_type, ours.rotary_dim, ours.windows) == ("phi3", 6, (16, 16))


def test_litgpt_llama3_scaling_and_an_equal_head(tmp_path: Path) -> None:
    config = small(tie_word_embeddings=True, head_dim=16)
    tensors = random_tensors(config)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 128}
    folder = write_litgpt(tmp_path / "lit", config, tensors, rope_adjustments=scaling, rope_base=500000)
    report = assert_converts(folder, tensors, tmp_path / "out")
    assert report["not_used"] == [{"source": "lm_head.weight", "reason": "equals transformer.wte.weight"}]
    rope = load_config(tmp_path / "out").rope
    assert (rope.kind, rope.theta, rope.original_max_position_embeddings) == ("llama3", 5e5, 128)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"parallel_residual": True}, "parallel_residual is True: only models with False are served"),
        ({"mlp_class_name": "GptNeoxMLP"}, "mlp_class_name is 'GptNeoxMLP'"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name is 'LayerNorm'"),
        ({"n_expert": 8}, "n_expert is 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"secret": 1}, "key 'secret' = 1 is not understood"),
        ({"n_head": "six"}, "n_head is 'six', expected a positive whole number"),
        ({"rope_base": "big"}, "rope_base is 'big', expected a positive number"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"rotary_percentage": None}, "rotary_percentage is None"),
        ({"n_head": 10**9, "n_query_groups": 10**9}, "does not hold 1000000000"),
        ({"sliding_window_size": 8, "sliding_window_indices": 5}, "expected a list"),
        ({"norm_qk": True, "attn_bias": True}, "features of qwen3 and of qwen2 together"),
        ({"sliding_window_size": 8, "sliding_window_indices": [1, 0]}, "in some of the layers only"),
        ({"rope_adjustments": {"factor": 2.0}}, "rope_adjustments is"),
        ({"n_query_groups": 3}, "does not hold 6 . 2 . 3 heads of 8 rows"),
    ],
)
def test_litgpt_settings_that_are_not_served_are_refused(params: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_litgpt(tmp_path / "lit", small(), random_tensors(small()), **params)
    with pytest.raises(ConvertError, match=reason):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "!!python/object/apply:os.system ['true']", "\x00", "[" * 9999, "1: 2"]
)
def test_a_yaml_that_is_not_one_is_refused(text: str, tmp_path: Path) -> None:
    folder = write_litgpt(tmp_path / "lit", small(), random_tensors(small()))
    (folder / "model_config.yaml").write_text(text)
    with pytest.raises(ConvertError, match=r"not YAML|not a YAML mapping"):
        open_source(folder)


# ---- what is refused by name --------------------------------------------------------------------------------


def test_gpt_neox_is_refused_by_name(tmp_path: Path) -> None:
    """Its fused layout could be taken apart, but its parallel layers and LayerNorm cannot be served."""
    config = small() | {"model_type": "gpt_neox"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"gpt_neox.layers.0.attention.query_key_value.weight": torch.ones(3, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConvertError, match="model_type 'gpt_neox' is not supported; known: llama"):
        convert(tmp_path, tmp_path / "out")
