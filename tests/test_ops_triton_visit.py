"""The checks of a visit to a GPU, on the GPU's kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.interpreted_triton  # noqa: F401  (first)
from tests.test_gpu_visit import visit

SECTIONS = [
    "attention-fp32", "attention-bf16", "small-kernels", "sampling", "rounded-layers", "model", "graphs",
    "graphs-invariant", "invariance",
]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_the_checks_pass_on_the_kernels(section: str, tmp_path: Path) -> None:
    done, found = visit(tmp_path, "", "--sections", section, on_kernels=True)
    assert found[section]["status"] == "ok", done.stdout + done.stderr
