"""config.json in every spelling transformers has used, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ConfigError, ModelConfig, RopeConfig, load_config
from model.rope import cos_sin_table

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPE_KEYS = ["rope_type", "type", "short_factor", "long_factor", "rope_theta", "factor", "low_freq_factor"]
ROPE_KEYS += ["high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"]
ROPE_TYPES = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
MORE_KEYS = ["rope_parameters", "rope_theta", "partial_rotary_factor", "sliding_window", "layer_types", "dtype"]
MORE_KEYS += ["max_position_embeddings", "rms_norm_eps", "head_dim", "eos_token_id", "attention_bias", "hidden_act"]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
LONGROPE |= {"original_max_position_embeddings": 64}


def read(**keys: Any) -> ModelConfig:
    return ModelConfig.from_dict({key: value for key, value in (BASE | keys).items() if value is not ...})


def test_the_plain_case() -> None:
    config = read(bos_token_id=[1, 2], torch_dtype="bfloat16", rms_norm_eps=1e-5)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
    assert (config.bos_token_id, config.dtype) == (1, "bfloat16")
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert config.windows == (None,) * 4
    assert config.rope == RopeConfig()
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm or config.tie_word_embeddings)


def test_the_divisor_is_of_one_head_not_of_the_model() -> None:
    assert read(hidden_size=768, num_attention_heads=12, num_key_value_heads=12).attention_scale == 1 / 8


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert read(head_dim=24).head_dim == 24
    assert read(model_type="qwen3").head_dim == 128


def test_without_kv_heads_every_head_has_its_own() -> None:
    assert read(num_key_value_heads=...).num_kv_heads == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 5e5},
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "rope_scaling": {"type": "llama3", **LLAMA3},
        },
    ],
)
def test_all_spellings_of_one_rope(keys: dict[str, Any]) -> None:
    assert read(**keys).rope == RopeConfig("llama3", 5e5, 1.0, 8.0, 1.0, 4.0, 64)


def test_longrope_in_all_spellings() -> None:
    """Phi-3's own (su, the original context at the top level), and that of transformers 5 after reading it."""
    lists = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    phi3 = {"model_type": "phi3", "max_position_embeddings": 512, "rope_theta": 1e4}
    old = read(**phi3, original_max_position_embeddings=64, rope_scaling={"type": "su", **lists})
    new = {"rope_type": "longrope", "type": "su", "rope_theta": 1e4, "original_max_position_embeddings": 64, **lists}
    assert read(**phi3, original_max_position_embeddings=64, rope_parameters=new).rope == old.rope
    assert (old.rope.kind, old.rope.factor, old.rope.long_factor[-1]) == ("longrope", 8.0, 4.0)
    assert old.rope.attention_factor == pytest.approx(math.sqrt(1.5))
    assert old.fused and old.longest_context == 512


def test_phi3_without_its_keys_takes_what_transformers_takes() -> None:
    config = read(model_type="phi3", num_key_value_heads=...)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.num_kv_heads) == (1e-5, 4096, 8)
    with pytest.raises(ConfigError, match="original_max_position_embeddings is 64 in one place and 4096 in another"):
        read(model_type="phi3", rope_scaling=LONGROPE)


def test_a_scaling_reaches_beyond_the_positions_where_it_says_so() -> None:
    longest = {"linear": 1024, "dynamic": 1024, "yarn": 2048}
    for kind, tokens in longest.items():
        scaling = {"rope_type": kind, "factor": 2.0}
        scaling |= {"original_max_position_embeddings": 1024} if kind == "yarn" else {}
        assert read(max_position_embeddings=512, rope_scaling=scaling).longest_context == tokens
    assert read(max_position_embeddings=512).longest_context == 512


def test_partial_rotary_width() -> None:
    assert read(partial_rotary_factor=0.5).rotary_dim == 4
    assert read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}).rotary_dim == 4


def test_windows() -> None:
    assert read(model_type="mistral").windows == (4096,) * 4
    assert read(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert read(model_type="qwen2", sliding_window=9).windows == (None,) * 4
    switched = {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}
    assert read(**switched, max_window_layers=3).windows == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(**switched, layer_types=kinds).windows == (9, None, 9, None)
    assert read(sliding_window=9).windows == (None,) * 4, "a llama has none, whatever its file says"
    assert read(model_type="qwen2", use_sliding_window=True, num_hidden_layers=30).windows == (None,) * 28 + (4096,) * 2


@pytest.mark.parametrize(("model_type", "usual"), [("llama", "full_attention"), ("phi3", "sliding_attention")])
def test_layers_that_a_family_does_not_tell_apart(model_type: str, usual: str) -> None:
    mixed = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(ConfigError, match=f"layer_types of a {model_type} must be {usual} in every layer"):
        read(model_type=model_type, sliding_window=9, layer_types=mixed)
    assert read(model_type=model_type, sliding_window=9, layer_types=[usual] * 4).model_type == model_type


def test_biases_and_norms_by_family() -> None:
    qwen2, qwen3 = read(model_type="qwen2"), read(model_type="qwen3", attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    assert read(mlp_bias=True).mlp_bias


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known: llama, mistral, phi3, qwen2, qwen3"),
        ({"model_type": ...}, "lacks model_type"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 64 is not a multiple"),
        ({"head_dim": 7}, "rotary width 7"),
        ({"partial_rotary_factor": 2.0}, "rotary width 16"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type 'ntk' is not supported; known: default"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' needs original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, "rotary setting 'attn_factor' is not understood"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1, expected bool"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 32}, "is 64 in one place and 32 in another"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1}}, "is 1, expected at least 2"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
            "'longrope' needs long_factor, original_max",
        ),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 3}}, "long_factor holds 3 numbers, expected 4"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0, 0, 1, 1]}}, "short_factor is 0, expected a positive"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "more than low_freq_factor 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "rotary width of at least 4"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected more than 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 10000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, expected at most 16777216"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected at most"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a positive number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor is 1e+300, expected a positive number between"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2"),
        ({"rope_scaling": {"factor": 2.0}}, "does not say its rope_type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "two kinds"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 500000.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "must name 4 layers"),
        ({"model_type": "mistral", "layer_types": 4}, "must name 4 layers"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "disagree"),
        ({"bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
    ],
)
def test_what_is_refused_and_why(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**keys)
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("{", "is not JSON"), ("[]", "holds list")])
def test_a_broken_file(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("module", ["model.config", "model.kv_cost", "model.memory"])
def test_arithmetic_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**13) | st.floats() | st.sampled_from(["yarn", "su", "phi3", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=4),
    max_leaves=6,
)
ROPES = st.fixed_dictionaries({}, optional={key: st.floats(0.1, 64) | st.integers(2, 64) for key in ROPE_KEYS[4:]})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*BASE, *MORE_KEYS]), JSON, max_size=4), ROPES, st.sampled_from(ROPE_TYPES))
def test_any_json_is_read_or_refused_with_one_line(keys: dict[str, Any], rope: dict[str, Any], kind: str) -> None:
    """No other error than ConfigError; and what is read gives a table of finite numbers."""
    lists = {key: [rope.get(key, 1.0)] * 4 for key in ("short_factor", "long_factor")} if kind == "longrope" else {}
    try:
        config = ModelConfig.from_dict({**BASE, "rope_scaling": {**rope, **lists, "rope_type": kind}, **keys})
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert bool(cos_sin_table(config, 40, "cpu").isfinite().all())
