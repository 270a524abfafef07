"""How many kernels a layer of a decode step launches, counted in Triton's interpreter: what docs/gpu.md says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tests.interpreted_triton  # noqa: F401  (first)
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.triton.ops import TritonOps
from server.engine.accelerator import filler_batch
from tests.gpu.models import PAGE_SIZE, config_of, random_decoder

SILENT = {"empty", "new_empty", "empty_like", "view", "t", "slice", "select", "detach", "unsqueeze", "_unsafe_view"}
"""Operations of torch that launch nothing: views, and memory that is not filled."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what a GPU would be given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        interpreter = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
        run = interpreter.run

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(kernel.__name__)
            with _disable_current_modes():
                return run(kernel, *args, **kwargs)

        monkeypatch.setattr(interpreter, "run", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in SILENT:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(num_layers: int, quantization: str | None, max_kv: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of one sequence's decode step."""
    config, device = config_of("toy"), torch.device("cpu")
    decoder = random_decoder(config, TritonOps(), device, torch.bfloat16, quantization)
    decoder = replace(decoder, layers=decoder.layers[:num_layers])
    layout = layout_for(config, PAGE_SIZE, "bfloat16")
    kv = KVCache(layout, (max_kv // PAGE_SIZE + 1,), device)
    for storage in kv.storages:
        storage.zero_()
    batch = replace(filler_batch([1], layout, 1, device), max_kv=max_kv)
    with monkeypatch.context() as patched:
        counted = Launches(patched)
        with counted:
            decoder.hidden(batch, kv)
    return counted.names


@pytest.mark.parametrize(("quantization", "expected"), [(None, 10), ("int8", 18), ("fp8", 18)])
def test_a_layer_of_a_decode_step(quantization: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (launches(layers, quantization, 4096, monkeypatch) for layers in (1, 2))
    assert len(two) - len(one) == expected, two


def test_no_merge_where_one_program_reads_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "merge_kernel" in launches(1, None, 4096, monkeypatch)
    assert "merge_kernel" not in launches(1, None, 100, monkeypatch)
