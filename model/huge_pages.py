"""Memory in huge pages, where the kernel gives them, for what a step reads whole.

Knows neither weights nor caches. In pages of 4 KiB the search for where a page lies takes up to a quarter of the time.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def in_huge_pages(size: int) -> Tensor:
    """[size] u8, zeros, from the start of a huge page on; what is never written takes no memory.

    Raises MemoryError where the system grants no such address space.
    """
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: the memory serves as it is
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
