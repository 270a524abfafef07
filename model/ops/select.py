"""Which operations serve a device.

Knows no model: one decision, made once per process, never per batch.
"""

from __future__ import annotations

import torch

from model.ops.interface import Ops
from model.ops.reference import ReferenceOps


def ops_for(device: torch.device | str) -> Ops:
    """The operations for a device; the reference ones run wherever torch does."""
    return ReferenceOps()
