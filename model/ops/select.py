"""Which operations serve a device.

Knows no model: one decision, made once per process, never per batch.
"""

from __future__ import annotations

from functools import cache

import torch

from model.ops.cpu.build import UnavailableError, find_library
from model.ops.cpu.native import CpuOps
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps


def ops_for(device: torch.device | str) -> Ops:
    """The operations for a device; the reference ones run wherever torch does."""
    return _cpu()[0] if torch.device(device).type == "cpu" else ReferenceOps()


def why(device: torch.device | str) -> str:
    """What ops_for chose, and the reason where a faster choice was not to be had; one line for logs and /version."""
    return _cpu()[1] if torch.device(device).type == "cpu" else "torch operations"


@cache
def _cpu() -> tuple[Ops, str]:
    try:
        ops = CpuOps(find_library())
    except (UnavailableError, OSError) as reason:  # OSError: a library that cannot be loaded
        return ReferenceOps(), f"torch operations: {reason}"
    return ops, ops.description
