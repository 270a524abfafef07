"""Quantised safetensors against packers of their own: every value exact, every scale used, all else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.cache import ensure_canonical
from convert.canonical import is_canonical
from convert.errors import ConvertError
from convert.formats.packed_numbers import EXPONENTS, FLOAT8
from convert.pipeline import convert
from server.plan.source import open_model
from tests.conftest import BASE_CONFIG, KINDS, random_tensors
from tests.convert_quantisers import CASES, compressed, fp8, gptq, mlx

Tensors = dict[str, torch.Tensor]


def write_quantised(
    folder: Path, said: dict[str, Any], quantise: Any, kind: str = "llama", key: str = "quantization_config"
) -> dict[str, np.ndarray[Any, Any]]:
    """A Hugging Face folder whose linears are quantised; returns what every tensor of the result must be."""
    config = BASE_CONFIG | KINDS[kind]
    stored: Tensors = {}
    want = {}
    for name, tensor in random_tensors(config).items():
        if "_proj.weight" in name:
            parts, want[name] = quantise(tensor.numpy())
            stored |= {f"{name.removesuffix('weight')}{leaf}": part.contiguous() for leaf, part in parts.items()}
        else:
            stored[name], want[name] = tensor, tensor.numpy()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {key: said}))
    return want


def assert_exact(out: Path, want: dict[str, np.ndarray[Any, Any]]) -> None:
    got = load_file(out / "model.safetensors")
    assert got.keys() == want.keys()
    assert [name for name, tensor in got.items() if not np.array_equal(tensor.numpy(), want[name])] == []


@pytest.mark.proves(format="safetensors, {case}", architecture="llama")
@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_one_that_was_packed(case: str, tmp_path: Path) -> None:
    said, quantise = CASES[case]
    want = write_quantised(tmp_path / "quantised", said, quantise)
    assert not is_canonical(tmp_path / "quantised")
    out = ensure_canonical(tmp_path / "quantised", tmp_path / "cache")
    assert_exact(out, want)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    report = json.loads((out / "conversion_report.json").read_text())
    assert report["proof"]["logits"]["passed"]
    row = next(row for row in report["tensors"] if row["target"].endswith("0.self_attn.q_proj.weight"))
    assert row["transform"].startswith(f"dequantise {said['quant_method']}")
    assert len(row["parts"]) > 1


@pytest.mark.proves(format="safetensors, mlx", architecture="llama")
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_groups(bits: int, tmp_path: Path) -> None:
    want = write_quantised(
        tmp_path / "mlx", {"bits": bits, "group_size": 16}, lambda m: mlx(m, bits), key="quantization"
    )
    convert(tmp_path / "mlx", tmp_path / "out")
    assert_exact(tmp_path / "out", want)


@pytest.mark.proves(format="safetensors, gptq", architecture="{kind}")
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_biases_and_norms_stay_beside_quantised_weights(kind: str, tmp_path: Path) -> None:
    said, quantise = CASES["gptq"]
    want = write_quantised(tmp_path / "quantised", said, quantise, kind)
    convert(tmp_path / "quantised", tmp_path / "out")
    assert_exact(tmp_path / "out", want)


def test_a_plan_counts_weights_as_they_are_served(tmp_path: Path) -> None:
    said, quantise = CASES["gptq"]
    want = write_quantised(tmp_path / "quantised", said, quantise)
    planned = open_model(str(tmp_path / "quantised"))
    assert {tensor.name: tensor.shape for tensor in planned.tensors} == {n: array.shape for n, array in want.items()}
    assert {tensor.dtype for tensor in planned.tensors} == {"float32"}


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    want = write_quantised(tmp_path / "quantised", {}, gptq, key="ignored")
    (tmp_path / "quantised" / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 16}))
    convert(tmp_path / "quantised", tmp_path / "out")
    assert_exact(tmp_path / "out", want)


def test_codes_of_fp8_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        assert np.array_equal(FLOAT8[name], codes.view(dtype).float().numpy(), equal_nan=True)
    assert np.array_equal(EXPONENTS, codes.view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "modelopt", "mxfp4", "quanto", "hqq", "aqlm", "fbgemm_fp8", "bitnet", "torchao"]
)
def test_other_schemes_are_refused_by_name(method: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "quantised", {"quant_method": method}, gptq)
    with pytest.raises(ConvertError, match=f"quantised as '{method}' are not supported"):
        convert(tmp_path / "quantised", tmp_path / "out")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq: bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 8}}}, "gptq: dynamic is"),
        ({"quant_method": "gptq", "bits": 8}, "needs"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: version is gemv"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format 'nvfp4-pack-quantized'"),
        (compressed("mixed-precision", num_bits=4, type="int"), "format 'mixed-precision'"),
        (compressed("pack-quantized", num_bits=4) | {"config_groups": {}}, "0 config_groups"),
        (compressed("int-quantized", num_bits=8) | {"transform_config": {"a": 1}}, "transform_config"),
    ],
)
def test_settings_that_are_not_known_are_refused(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "quantised", said, gptq)
    with pytest.raises(ConvertError, match=reason):
        convert(tmp_path / "quantised", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("without weight_scale", "quantised matrix of shape .* with 0 scales"),
        ("more weight_scale_2", r"'model\.layers\.0\.mlp\.down_proj\.weight_scale_2' is not part of a llama model"),
        ("more pre_quant_scale", "pre_quant_scale' is not part of a llama model"),
        ("scale of another shape", r"has shape \(3,\), which does not fit"),
        ("NaN scale", "weight_scale' holds NaN or inf"),
    ],
)
def test_a_scale_is_never_dropped(change: str, reason: str, tmp_path: Path) -> None:
    folder, prefix = tmp_path / "quantised", "model.layers.0.mlp.down_proj."
    write_quantised(folder, {"quant_method": "fp8"}, lambda m: fp8(m, "tensor"))
    tensors = load_file(folder / "model.safetensors")
    if change.startswith("without"):
        del tensors[prefix + "weight_scale"]
    elif change.startswith("more"):
        tensors[prefix + change.split()[1]] = torch.tensor(2.0)
    else:
        tensors[prefix + "weight_scale"] = torch.ones(3) if "shape" in change else torch.tensor(float("nan"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=reason):
        convert(folder, tmp_path / "out")


def test_scales_of_activations_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    write_quantised(folder, {"quant_method": "fp8"}, lambda m: fp8(m, "tensor"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    report = convert(folder, tmp_path / "out")
    assert report is not None
    [row] = report["not_used"]
    assert row["source"].endswith("input_scale") and row["reason"].startswith("scale of activations")
