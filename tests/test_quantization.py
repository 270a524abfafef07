"""Weights rounded while loading: smaller, close to what they were, said aloud, and the same tokens in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from model.config import ConfigError, load_config
from model.ops.select import ops_for, why
from model.weights import load_decoder
from server.engine.facts import EngineConfig
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine
from tests.conftest import ServerFactory
from tests.fake_device import outputs
from tests.native_ops import random
from tests.real_engine import run

Factory = Callable[..., Path]
QUANTIZATIONS = ("int8", "int4")
WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(autouse=True)
def kernels() -> None:
    if ops_for("cpu").name != "cpu":
        pytest.skip(why("cpu"))


def test_layers_shrink_and_the_head_is_8_bit_with_either(tiny_model: Factory) -> None:
    folder = tiny_model("llama", **WIDE)
    whole, int8, int4 = (
        load_decoder(folder, load_config(folder), ops_for("cpu"), "cpu", torch.bfloat16, kind)
        for kind in (None, *QUANTIZATIONS)
    )
    assert int8.head.nbytes == int4.head.nbytes < whole.head.nbytes
    assert int4.weights_nbytes < int8.weights_nbytes < whole.weights_nbytes
    x = random(5, 256, dtype=torch.bfloat16)
    expected = whole.layers[0].mlp.gate_up
    for decoder, limit in ((int8, 0.01), (int4, 0.15)):
        assert torch.equal(decoder.embedding, whole.embedding)
        product = decoder.ops.linear(x, decoder.layers[0].mlp.gate_up, torch.float32)
        exact = whole.ops.linear(x, expected, torch.float32)
        assert float((product - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_request_gets_the_same_tokens_alone_and_in_company(tiny_model: Factory, quantization: str) -> None:
    config = EngineConfig(
        str(tiny_model("llama", **WIDE)),
        quantization=quantization,
        page_size=4,
        kv_cache_memory=1 << 20,
        max_model_len=64,
    )
    params = SamplingParams(max_tokens=12, temperature=0)
    requests = [
        Submit(f"r{index}", Submit.pack([5 + index + 3 * i for i in range(7 + index)]), params) for index in range(7)
    ]
    together = outputs(run(build_engine(config), *requests))
    for request in requests[::3]:
        engine = build_engine(config)
        assert engine.info.quantization == quantization
        assert outputs(run(engine, request))[request.id, 0] == together[request.id, 0]


def test_half_precision_is_refused(tiny_model: Factory) -> None:
    with pytest.raises(ConfigError, match="--quantization int8: needs --dtype bfloat16 or float32"):
        build_engine(EngineConfig(str(tiny_model("llama")), quantization="int8", dtype="float16"))


def test_the_start_line_and_version_say_it(tiny_model: Factory, server_factory: ServerFactory) -> None:
    server = server_factory(tiny_model("llama"), "--quantization", "int4", "--kv-cache-memory", "512KiB")
    assert httpx.get(f"{server.url}/version").json()["quantization"] == "int4"
    assert "weights int4, head int8" in server.output
