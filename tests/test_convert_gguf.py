"""GGUF: the container, its number formats, every architecture against the tensors it was made from, damaged files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from convert.detect import open_source
from convert.dtypes import shortest_float
from convert.errors import ConvertError
from convert.formats.gguf_model import open_gguf
from convert.formats.gguf_quants import BLOCKS, REFUSED_TYPES, TYPE_NAMES, dequantize
from convert.formats.gguf_rope import invert_llama3, llama3_ratios
from convert.pipeline import convert
from tests.conftest import BASE_CONFIG, KINDS, random_tensors
from tests.convert_sources import write_gguf


def small(kind: str = "llama", **overrides: Any) -> dict[str, Any]:
    return BASE_CONFIG | KINDS[kind] | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40} | overrides


def with_biases(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Llama with attention_bias: all four projections have one."""
    tensors = random_tensors(config)
    for name in list(tensors):
        if "self_attn" in name:
            rows = tensors[name].shape[0]
            tensors[name.replace("weight", "bias")] = torch.randn(rows, generator=torch.Generator().manual_seed(rows))
    return tensors


# ---- the same tensors come back ---------------------------------------------------------------------------


@pytest.mark.proves(format="GGUF", architecture="llama")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 2), (8, 1), (9, 3)])
def test_llama_tensors_come_back_bit_for_bit(heads: int, kv_heads: int, tmp_path: Path) -> None:
    config = small(num_attention_heads=heads, num_key_value_heads=kv_heads)
    tensors = random_tensors(config)
    convert(write_gguf(tmp_path / "a.bin", config, tensors), tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


@pytest.mark.proves(format="GGUF", architecture="{arch}")
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_split_half_architectures_are_not_permuted(arch: str, tmp_path: Path) -> None:
    config = small(arch)
    tensors = random_tensors(config)
    convert(write_gguf(tmp_path / "a.gguf", config, tensors, arch), tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


@pytest.mark.proves(format="GGUF", architecture="llama")
def test_biases_move_with_their_rows(tmp_path: Path) -> None:
    tensors = with_biases(small())
    convert(write_gguf(tmp_path / "a.gguf", small(), tensors), tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_bias"] is True


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    config = small(tie_word_embeddings=True)
    convert(write_gguf(tmp_path / "a.gguf", config, random_tensors(config)), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_rounding_on_request_is_torchs(tmp_path: Path) -> None:
    config = small()
    tensors = random_tensors(config)
    report = convert(write_gguf(tmp_path / "a.gguf", config, tensors), tmp_path / "out", dtype="BF16")
    assert report is not None and report["lossless"] is False
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), rounded)


def split_in_two(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Two parts as llama-gguf-split leaves them: the second has no metadata of the model."""
    tensors = random_tensors(small())
    names = list(tensors)
    first, second = ({name: tensors[name] for name in part} for part in (names[:9], names[9:]))
    split: dict[str, Any] = {"split.count": 2, "split.no": 0, "split.tensors.count": len(tensors)}
    write_gguf(tmp_path / "m-00001-of-00002.gguf", small(), first, extra=split)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", small(), second, extra=split | {"split.no": 1})
    return tensors


@pytest.mark.proves(format="GGUF, split", architecture="llama")
@pytest.mark.parametrize("part", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
def test_split_files_are_one_model_whichever_part_is_named(part: str, tmp_path: Path) -> None:
    tensors = split_in_two(tmp_path)
    convert(tmp_path / part, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_a_missing_or_strange_part_is_named(tmp_path: Path) -> None:
    split_in_two(tmp_path)
    second = tmp_path / "m-00002-of-00002.gguf"
    write_gguf(second, small(), {}, extra={"split.no": 1})
    with pytest.raises(ConvertError, match=r"the parts hold 9 tensors, split\.tensors\.count says 21"):
        open_source(tmp_path / "m-00001-of-00002.gguf")
    second.unlink()
    with pytest.raises(ConvertError, match=r"part m-00002-of-00002\.gguf of the model is missing"):
        open_source(tmp_path / "m-00001-of-00002.gguf")


# ---- config -----------------------------------------------------------------------------------------------


def test_config_in_both_spellings_with_short_floats(tmp_path: Path) -> None:
    source = open_gguf(write_gguf(tmp_path / "a.gguf", small(rope_theta=500000.0), random_tensors(small())))
    config = source.values()
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 500000.0)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert source.config["rope_theta"].origin == "llama.rope.freq_base"


@pytest.mark.parametrize("value", [1e-05, 1e-06, 0.1, 1e6, 3.0])
def test_fp32_prints_as_the_shortest_decimal_that_reads_back(value: float) -> None:
    stored = float(np.float32(value))
    assert shortest_float(stored) == value and np.float32(shortest_float(stored)) == np.float32(value)


@pytest.mark.parametrize(("factor", "high", "original"), [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (16.0, 4.0, 8192)])
def test_rope_freqs_inverts_to_llama3_scaling(factor: float, high: float, original: int, tmp_path: Path) -> None:
    config = small(head_dim=64, rope_theta=500000.0)
    ratios = llama3_ratios(500000.0, 64, factor, 1.0, high, original)
    more = {"rope_freqs.weight": ratios}
    convert(write_gguf(tmp_path / "a.gguf", config, random_tensors(config), more_tensors=more), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    want = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    assert written["rope_scaling"] == want
    assert written["rope_parameters"] == want | {"rope_theta": 500000.0}


def test_rope_freqs_of_another_shape_is_no_llama3_scaling() -> None:
    assert invert_llama3(np.linspace(1, 9, 32).astype(np.float32), 10000.0) is None


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0 is not understood"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.dimension_count": 4}, "differs from head_dim 8"),
        ({"split.count": 2}, "is one of 2 parts"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "must be a positive number"),
    ],
)
def test_metadata_that_would_change_the_model_is_refused(extra: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", small(), random_tensors(small()), extra=extra)
    with pytest.raises(ConvertError, match=reason):
        open_source(path)


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="architecture 'mamba' is not supported"):
        open_source(write_gguf(tmp_path / "a.gguf", small(), {}, arch="mamba"))


def test_a_tensor_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    more = {"blk.0.attn_sinks.weight": np.zeros(6, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", small(), random_tensors(small()), more_tensors=more)
    with pytest.raises(ConvertError, match=r"'blk\.0\.attn_sinks\.weight' is not part of a llama model"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(small())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConvertError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(write_gguf(tmp_path / "a.gguf", small(), tensors), tmp_path / "out")


# ---- number formats ---------------------------------------------------------------------------------------


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for code, name in TYPE_NAMES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == BLOCKS[name], name
    known = {kind.value for kind in GGMLQuantizationType}
    assert known <= TYPE_NAMES.keys() | REFUSED_TYPES.keys()


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k not in ("F32", "F16", "BF16", "F64")])
def test_dequantised_bits_equal_the_gguf_packages(kind: str) -> None:
    values, size = BLOCKS[kind]
    blocks = np.random.default_rng(0).integers(0, 120, (4100 if values == 32 else 64, size)).astype(np.uint8)
    want = quants.dequantize(blocks, GGMLQuantizationType[kind])
    got = dequantize(blocks, kind)
    assert got.dtype == np.float32 and got.tobytes() == np.asarray(want, np.float32).tobytes()


@pytest.mark.proves(format="GGUF, {kind}", architecture="llama")
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_quantised_matrices_convert_to_their_exact_values(kind: str, tmp_path: Path) -> None:
    config = small()
    tensors = random_tensors(config)
    convert(write_gguf(tmp_path / "a.gguf", config, tensors, quant=kind), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        stored = quants.quantize(tensors[name].numpy(), GGMLQuantizationType[kind])
        want = quants.dequantize(stored, GGMLQuantizationType[kind])
        assert np.array_equal(got[name].float().numpy(), want), name


# ---- damage -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small(num_hidden_layers=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", config, random_tensors(config))


@pytest.fixture
def whole(whole_file: Path) -> bytes:
    return whole_file.read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    tensors = random_tensors(small())
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    with pytest.raises(ConvertError, match=r"a\.gguf at byte \d+: tensor 'blk\.1\.ffn_up\.weight' holds NaN or inf"):
        convert(write_gguf(tmp_path / "a.gguf", small(), tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == [tmp_path / "a.gguf"]


@pytest.mark.parametrize("length", [3, 23, 24, 100, 600, -1])
def test_truncated_files_name_the_place(length: int, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[:length])
    with pytest.raises(ConvertError, match=r"a\.gguf at byte \d+: "):
        open_source(path)


def test_counts_of_a_hostile_header_cost_nothing(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[:8] + (2**62).to_bytes(8, "little") + whole[16:])
    with pytest.raises(ConvertError, match="cannot fit"):
        open_source(path)


def test_big_endian_and_old_versions_are_named(whole: bytes, tmp_path: Path) -> None:
    for version, hint in ((b"\0\0\0\3", "big-endian"), (b"\1\0\0\0", "version 1")):
        path = tmp_path / "a.gguf"
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(ConvertError, match=hint):
            open_source(path)


def test_overlapping_tensors_and_refused_types_are_named(whole: bytes, tmp_path: Path) -> None:
    at = whole.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[: at + 4] + bytes(8) + whole[at + 12 :])
    with pytest.raises(ConvertError, match="overlap"):
        open_source(path)
    path.write_bytes(whole[:at] + (41).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ConvertError, match="quantisation Q1_0 is not supported"):
        open_source(path)


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1), removed=st.sampled_from([0, 1, 4, 8]), inserted=st.binary(max_size=8))
def test_any_damage_to_the_header_is_an_error_or_harmless(
    place: float, removed: int, inserted: bytes, whole_file: Path
) -> None:
    """Replace, delete or insert bytes: either the file still converts, or one ConvertError says what is wrong."""
    whole = whole_file.read_bytes()
    start = int(place * (whole.index(b"output_norm.weight") + 200))
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "a.gguf", Path(folder) / "out"
        path.write_bytes(whole[:start] + inserted + whole[start + removed :])
        try:
            convert(path, out)
        except ConvertError as error:
            assert "\n" not in str(error)
            assert [file.name for file in Path(folder).iterdir()] == ["a.gguf"]
        else:
            assert (out / "conversion_report.json").is_file()
