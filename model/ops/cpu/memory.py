"""Memory for packed weights: huge pages, where matrices lie side by side in the order of packing.

Knows no layouts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.huge_pages import in_huge_pages

CHUNK = 64 << 20
"""Bytes of address space that matrices share; what is never written takes no memory."""
LINE = 64
"""Bytes of a line of the caches, at which a matrix starts."""


class WeightMemory:
    """A chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def hold(self, values: Tensor) -> Tensor:
        """A contiguous copy of values."""
        return self.room(values.shape, values.dtype).copy_(values)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor to be written."""
        nbytes = math.prod(shape) * dtype.itemsize
        needed = -(-nbytes // LINE) * LINE
        if needed > self._rest.numel():
            self._rest = in_huge_pages(max(CHUNK, needed))
        room = self._rest[:nbytes].view(dtype).view(shape)
        self._rest = self._rest[needed:]
        return room
