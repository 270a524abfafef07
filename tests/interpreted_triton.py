"""Triton's interpreter for tests: kernels run on CPU tensors. Import before anything of model.ops.triton.

Knows no kernel. Skips the importing module, with the reason, where Triton is missing or kernels are compiled already.
"""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: make test-triton")
