"""Attention of other packages: our tables turned into their calls, and what is refused before it can serve.

The packages need a GPU; here stand-ins answer their published calls. That our calls fit the real ones is checked where
they are installed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ConfigError
from model.ops.attention_backends import Attention, FlashAttention3, FlashInfer
from model.ops.attention_choice import PACKAGES, Served, chosen, obstacle, trial, try_out
from model.ops.reference import ReferenceOps
from server.engine.facts import EngineConfig
from server.engine.startup import build_engine
from tests.attention_packages import PrefillWrapper, flash_attn_with_kvcache

OURS = ReferenceOps().attention
CPU = torch.device("cpu")
HOPPER = (9, 0)
SERVED = Served(torch.bfloat16, torch.bfloat16, 6, 2, 64, 16, (None, 50))
SHAPES = [
    SERVED,
    Served(torch.float16, torch.float16, 4, 4, 128, 16, (None,)),
    Served(torch.bfloat16, torch.bfloat16, 8, 1, 64, 4, (1, 16, 64, 200)),
    Served(torch.bfloat16, torch.bfloat16, 8, 2, 256, 64, (None, 100)),
]


def flash_infer() -> FlashInfer:
    return FlashInfer(lambda: PrefillWrapper(torch.zeros(1), "HND"))


ADAPTERS: dict[str, Callable[[], Attention]] = {
    "flash-attn": lambda: FlashAttention3(flash_attn_with_kvcache),
    "flashinfer": flash_infer,
}


@pytest.mark.parametrize("served", SHAPES, ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_tables_pages_and_windows_reach_the_package_as_it_reads_them(name: str, served: Served) -> None:
    assert try_out(ADAPTERS[name](), OURS, served, CPU) is None


@pytest.mark.parametrize("name", ADAPTERS)
def test_rows_of_no_sequence_are_zero(name: str) -> None:
    q, kv, tables = trial(SERVED, (1, 40, 7), None, CPU)
    padded = torch.cat((q, q[:3]))
    out = ADAPTERS[name]()(padded, kv, tables, 0.125, None)
    assert not out[-3:].any()
    torch.testing.assert_close(out[:-3], OURS(q, kv, tables, 0.125, None), rtol=0, atol=2e-2)


def test_flashinfer_plans_once_for_all_layers_of_a_step_and_anew_for_the_next() -> None:
    attention = flash_infer()
    wrapper = attention.plans
    for step in range(2):
        q, kv, tables = trial(SERVED, (1, 1, 1), None, CPU)
        for _ in range(3):
            attention(q, kv, tables, 0.125, None)
            attention(q, kv, tables, 0.125, 50)
        assert [plan.wrapper.plans for plan in wrapper.values() if isinstance(plan.wrapper, PrefillWrapper)] == [
            step + 1
        ] * 2


def wrong_window(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """A window that leaves the newest token out of the count."""
    left = kwargs.pop("window_size")[0]
    return flash_attn_with_kvcache(q, k, v, window_size=(left if left < 0 else left + 1, 0), **kwargs)


def reads_what_is_masked(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """0 * NaN from the last page's rest, as a kernel that only masks scores would have it."""
    out = flash_attn_with_kvcache(q, k, v, **kwargs)
    return out + 0 * v[kwargs["page_table"][:, -1].long()].sum()


def breaks(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("This flash attention build does not support paged KV.")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (wrong_window, r"differs from our own attention by .* \(window 50"),
        (reads_what_is_masked, "differs from our own attention by inf"),
        (breaks, "it fails: This flash attention build does not support paged KV."),
    ],
)
def test_a_package_that_disagrees_at_the_start_does_not_serve(kernel: Callable[..., Tensor], reason: str) -> None:
    assert re.search(reason, try_out(FlashAttention3(kernel), OURS, SERVED, CPU) or "")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules under the packages' names."""
    flash, infer = ModuleType("flash_attn_interface"), ModuleType("flashinfer")
    flash.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    infer.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper  # type: ignore[attr-defined]
    for module in (flash, infer):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("installed")
def test_auto_takes_flash_attention_where_it_is_installed_and_fits() -> None:
    attention, word = chosen("auto", OURS, SERVED, CPU, HOPPER, False)
    assert isinstance(attention, FlashAttention3) and word == "attention by flash-attn 3"
    attention, word = chosen("auto", OURS, SERVED, CPU, HOPPER, True)
    assert attention == OURS and "Triton, not by flash-attn 3: " in word and "--batch-invariant" in word
    assert chosen("triton", OURS, SERVED, CPU, HOPPER, False) == (OURS, "attention by Triton")
    attention, word = chosen("flashinfer", OURS, SERVED, CPU, HOPPER, False)
    assert isinstance(attention, FlashInfer) and word == "attention by FlashInfer"


@pytest.mark.usefixtures("installed")
def test_a_package_asked_for_by_name_that_does_not_fit_is_refused() -> None:
    served = Served(torch.bfloat16, torch.int8, 6, 2, 64, 16, (None,))
    with pytest.raises(ValueError, match="FlashInfer cannot be used here: it takes fp16 and bf16 with a cache of"):
        chosen("flashinfer", OURS, served, CPU, HOPPER, False)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.ops.attention_choice.find_spec", lambda module: None)
    assert chosen("auto", OURS, SERVED, CPU, HOPPER, False) == (OURS, "attention by Triton")
    with pytest.raises(ValueError, match="is not installed; leave --attention-backend out"):
        chosen(name, OURS, SERVED, CPU, HOPPER, False)


def test_what_a_package_lacks_is_told() -> None:
    flash, infer = PACKAGES["flash-attn"], PACKAGES["flashinfer"]
    assert obstacle(flash, SERVED, HOPPER, False) is obstacle(infer, SERVED, (12, 0), False) is None
    assert "sm_100" in (obstacle(flash, SERVED, (10, 0), False) or "")
    odd = Served(torch.bfloat16, torch.bfloat16, 8, 2, 80, 16, (None,))
    assert "no heads of 80 channels" in (obstacle(infer, odd, HOPPER, False) or "")
    assert obstacle(flash, odd, HOPPER, False) is None


def test_a_cpu_has_no_choice(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="--attention-backend flashinfer: only Triton kernels on a GPU"):
        build_engine(EngineConfig(str(tiny_model("llama")), attention_backend="flashinfer", device="cpu"))


class Recorder:
    """Keeps the calls of a function that it stands for, and answers with `out`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls: list[inspect.BoundArguments] = []
        self._signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append(self._signature.bind(*args, **kwargs))
        q: Tensor = args[0]
        return q


def test_our_call_fits_flash_attention_where_it_is_installed() -> None:
    module = pytest.importorskip("flash_attn_interface", reason="flash-attn 3 is not installed")
    record = Recorder(module.flash_attn_with_kvcache)
    q, kv, tables = trial(SERVED, (1, 40, 7), 50, CPU)
    FlashAttention3(record)(q, kv, tables, 0.125, 50)
    assert len(record.calls) == 1


def test_our_calls_fit_flashinfer_where_it_is_installed() -> None:
    real = pytest.importorskip("flashinfer", reason="FlashInfer is not installed").BatchPrefillWithPagedKVCacheWrapper
    plan, run = (Recorder(partial(function, None)) for function in (real.plan, real.run))
    wrapper = SimpleNamespace(plan=plan, run=run)
    FlashInfer(lambda: wrapper)(*trial(SERVED, (1, 40, 7), 50, CPU), 0.125, 50)
    assert len(plan.calls) == len(run.calls) == 1
