"""Settings: flags, environment and defaults come from one place, and mistakes are named."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from model.sizes import parse_size
from server.config import ServeConfig, add_options, env_name, flag_name, markdown_table, read_config
from server.engine.facts import EngineConfig


def read(*flags: str, **environment: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_config(parser.parse_args(flags), environment)


def test_defaults() -> None:
    config = read()
    assert config == ServeConfig()
    assert (config.host, config.port, config.model) == ("127.0.0.1", 8000, None)


def test_flag_beats_environment_beats_default() -> None:
    assert read(ROPEWAY_PORT="9000").port == 9000
    assert read("--port", "9001", ROPEWAY_PORT="9000").port == 9001
    assert read(ROPEWAY_PORT="").port == 8000
    assert read("folder", ROPEWAY_MODEL="other").model == "folder"
    assert read(ROPEWAY_MODEL="other").model == "other"


def test_repeatable_flags_and_lists_in_the_environment() -> None:
    assert read("--served-model-name", "a", "--served-model-name", "b").served_model_name == ("a", "b")
    assert read(ROPEWAY_API_KEY="k1, k2,").api_key == ("k1", "k2")


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key", "--served-model-name"])
def test_an_empty_value_is_not_taken_for_none(flag: str) -> None:
    """A shell makes one of "$KEY" where KEY is unset, and without a key the server would be open."""
    with pytest.raises(ValueError, match=f"{flag}: an empty value"):
        read(flag, "given", flag, " ")


def test_switches() -> None:
    assert read("--batch-invariant").batch_invariant is True
    assert read("--prefix-caching", "false").prefix_caching is False
    assert read(ROPEWAY_STRICT_PARAMS="yes").strict_params is True


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5gb", 1_500_000_000),
        ("1000", 1000),
        (" 4 k ", 4000),
        ("2TB", 2 * 1000**4),
        ("10B", 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert read("--kv-cache-memory", text).kv_cache_memory == size


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--port", "x"], {}, "--port: 'x' is not a whole number"),
        ([], {"ROPEWAY_PORT": "x"}, "ROPEWAY_PORT: 'x' is not a whole number"),
        (["--port", "70000"], {}, "--port 70000: must be at most 65535"),
        (["--page-size", "0"], {}, "--page-size 0: must be at least 1"),
        (["--device", "tpu"], {}, "--device tpu: not one of auto, cpu, cuda"),
        (["--kv-cache-memory", "2 apples"], {}, "'2 apples' is not a size"),
        (["--kv-cache-memory", "GiB"], {}, "is not a size"),
        (["--kv-cache-memory", "9" * 400], {}, "is not a size"),
        (["--kv-cache-memory", "2"], {}, "'2' would be 2 bytes: add a unit, as in 2GiB"),
        (["--kv-cache-memory=-5MiB"], {}, "'-5MiB' is not a size from 1 byte up"),
        (["--drain-timeout", "nan"], {}, "--drain-timeout nan: must be at least 0"),
        (["--batch-invariant", "maybe"], {}, "--batch-invariant: 'maybe' is not one of"),
        (
            ["--max-num-seqs", "1000", "--max-num-batched-tokens", "512"],
            {},
            "--max-num-batched-tokens 512: must be at least --max-num-seqs 1000",
        ),
    ],
)
def test_mistakes_name_the_setting_and_the_value(flags: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read(*flags, **environment)
    assert message in str(error.value)


def test_every_field_has_a_flag_a_variable_and_help() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    text = parser.format_help()
    for item in fields(ServeConfig):
        assert item.metadata["help"].split()[0] in text
        assert env_name(item.name) in text.replace("\n", " ")
        assert item.metadata["positional"] or f"--{flag_name(item.name)}" in text


def test_the_engine_is_told_everything_it_knows_a_field_for() -> None:
    config = read("--page-size", "4", "--kv-cache-memory", "1MiB", "--max-model-len", "64", "--threads", "2")
    engine = config.engine_config("/folder")
    assert engine == EngineConfig("/folder", page_size=4, kv_cache_memory=1024**2, max_model_len=64, threads=2)


def test_docs_list_every_flag() -> None:
    """After a change: python -c 'from server.config import markdown_table; print(markdown_table())'."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "serve.md").read_text(encoding="utf-8")
    assert markdown_table() in text
