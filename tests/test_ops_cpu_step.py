"""All layers in one native call: the bits of the loop over operations, for every kind of layer and batch."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.cpu.native import CpuOps
from model.weights import load_decoder
from tests.conftest import ModelFactory
from tests.native_ops import native_library, threads
from tests.test_decoder import Session, some_tokens

WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one window": ("mistral", {"sliding_window": 7}),
    "biased, two groups": ("qwen2", WINDOWS),
    "head norms": ("qwen3", {"head_dim": 12}),
    "wide heads": ("llama", {"head_dim": 20}),  # attention is wider than the hidden size
    "narrow": ("llama", {"intermediate_size": 16}),
}
WORK: tuple[dict[str, int], ...] = (
    {"a": 70},  # a prompt, over a cut of the keys
    {"a": 1},
    {"a": 1, "b": 9, "c": 1},  # mixed
    {"a": 1, "b": 1, "c": 1},
    {"d": 130, "c": 2},  # grows what is kept between calls
    {"d": 1},
)


class OneByOne(CpuOps):
    """The slow twin: the decoder's own loop over native operations."""

    def layers_runner(self, decoder: Decoder, kv: KVCache) -> None:
        return None


@pytest.fixture(scope="module")
def both() -> tuple[CpuOps, CpuOps]:
    library = native_library()
    return CpuOps(library), OneByOne(library)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int4")],
)
def test_logits_and_cache_are_those_of_the_loop(
    kind: str,
    dtype: torch.dtype,
    quantization: str | None,
    both: tuple[CpuOps, CpuOps],
    tiny_model: ModelFactory,
) -> None:
    family, more = KINDS[kind]
    folder = tiny_model(family, **more)
    whole, loop = (Session(load_decoder(folder, load_config(folder), ops, "cpu", dtype, quantization)) for ops in both)
    assert both[0].layers_runner(whole.decoder, whole.kv) is not None
    for step, work in enumerate(WORK):
        tokens = {name: some_tokens(count, step) for name, count in work.items()}
        with threads(1 + step % 2):
            actual, expected = whole.feed(tokens), loop.feed(tokens)
        assert all(torch.equal(actual[name], expected[name]) for name in work), work
        for mine, theirs in zip(whole.kv.storages, loop.kv.storages, strict=True):
            assert torch.equal(bits(mine), bits(theirs)), work


def test_a_cache_of_another_float_type_and_rows_of_padding(
    both: tuple[CpuOps, CpuOps], tiny_model: ModelFactory
) -> None:
    folder = tiny_model("llama")
    config, outcomes = load_config(folder), []
    for ops in both:
        session = Session(load_decoder(folder, config, ops, "cpu", torch.float32))
        layout = layout_for(config, 4, "bfloat16")
        session.kv = KVCache(layout, (40,), "cpu")
        session.kv.storages[0].zero_()
        session.feed({"a": some_tokens(5)})
        batch = session.batch({"a": some_tokens(3)})
        assert len(session.pages["a"]) * 4 >= 8
        padded = replace(
            batch,
            token_ids=torch.cat((batch.token_ids, torch.zeros(2, dtype=torch.int64))),
            positions=torch.cat((batch.positions, torch.zeros(2, dtype=torch.int64))),
            slots=(torch.cat((batch.slots[0], torch.zeros(2, dtype=torch.int64))),),
        )
        outcomes.append((session.decoder.forward(padded, session.kv), session.kv.storages[0]))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outcomes, strict=True))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits_two_groups(
    dtype: torch.dtype, kv_dtype: str, both: tuple[CpuOps, CpuOps], tiny_model: ModelFactory
) -> None:
    folder = tiny_model("qwen2", **WINDOWS)
    config, outcomes = load_config(folder), []
    for ops in both:
        session = Session(load_decoder(folder, config, ops, "cpu", dtype))
        session.kv = KVCache(layout_for(config, 4, kv_dtype), (200, 200), "cpu")
        for storage in session.kv.storages:
            storage.fill_(255)  # NaN as a scale
        logits = [session.feed({name: some_tokens(count, 1) for name, count in work.items()}) for work in WORK]
        outcomes.append((logits, session.kv.storages))
    assert both[0].layers_runner(session.decoder, session.kv) is not None
    (mine, my_bytes), (theirs, their_bytes) = outcomes
    for step, work in enumerate(WORK):
        assert all(torch.equal(mine[step][name], theirs[step][name]) for name in work), work
        assert all(mine[step][name].isfinite().all() for name in work), work
    assert all(torch.equal(ours, others) for ours, others in zip(my_bytes, their_bytes, strict=True))


def test_what_is_not_native_goes_one_by_one(both: tuple[CpuOps, CpuOps], tiny_model: ModelFactory) -> None:
    folder = tiny_model("llama")
    decoder = load_decoder(folder, load_config(folder), both[0], "cpu", torch.float16)
    session = Session(decoder)
    assert both[0].layers_runner(decoder, session.kv) is None
    assert session.feed({"a": some_tokens(9)})["a"].isfinite().all()


def test_a_decoder_keeps_no_cache_alive(both: tuple[CpuOps, CpuOps], tiny_model: ModelFactory) -> None:
    folder = tiny_model("llama")
    session = Session(load_decoder(folder, load_config(folder), both[0], "cpu", torch.float32))
    session.feed({"a": some_tokens(3)})
    decoder, cache = session.decoder, ref(session.kv)
    del session
    gc.collect()
    assert cache() is None and decoder.weights_nbytes > 0
