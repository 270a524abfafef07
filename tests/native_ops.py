"""What the tests of the native operations share: the library, random tensors, a tolerance, a number of threads.

Knows no operation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.ops.cpu.build import UnavailableError, find_compiler, find_library
from model.ops.cpu.native import CpuOps


def compiler_or_skip() -> list[str]:
    """Skips where there is none."""
    try:
        return find_compiler()
    except UnavailableError as reason:
        pytest.skip(str(reason))


def native_library() -> Path:
    """Skips where kernels are off or cannot be built here; a compiler that stumbles over our sources is a failure."""
    if os.environ.get("ROPEWAY_KERNELS") == "off":
        pytest.skip("native kernels are off (ROPEWAY_KERNELS=off)")
    compiler_or_skip()
    return find_library()


@contextmanager
def ops_built_with(flags: str) -> Iterator[CpuOps]:
    """The operations of a library that the compiler was given more flags for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPEWAY_KERNELS_FLAGS", f"{os.environ.get('ROPEWAY_KERNELS_FLAGS', '')} {flags}".strip())
        yield CpuOps(native_library())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, rounding: torch.dtype) -> None:
    """Equal up to a few units in the last place of the dtype, measured against the largest value."""
    limit = (1e-5 if rounding == torch.float32 else 1.6e-2) * max(1.0, float(expected.float().abs().max()))
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=0)
