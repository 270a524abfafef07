"""Memory for packed weights: huge pages where the kernel gives them, side by side in the order of packing.

Knows no layouts. A step reads every weight once; in pages of 4 KiB the search for where a page lies costs up to a
quarter of the time.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
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
            self._rest = _chunk(max(CHUNK, needed))
        room = self._rest[:nbytes].view(dtype).view(shape)
        self._rest = self._rest[needed:]
        return room


def _chunk(size: int) -> Tensor:
    """[size] u8 zeros that start at a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: the memory serves as it is
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + size]
