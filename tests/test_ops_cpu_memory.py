"""Where packed weights lie: whole copies at lines of the cache, apart, in memory that asks for huge pages."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.ops.cpu.memory import CHUNK, LINE, WeightMemory
from tests.native_ops import random

SMAPS = Path("/proc/self/smaps")


def mapping_of(tensor: Tensor) -> str | None:
    """What the kernel says of the mapping that a tensor lies in; None once it is gone."""
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE)[1:]:
        first, last = (int(end, 16) for end in text.split(" ", 1)[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return text
    return None


def test_tensors_are_copied_whole_and_apart() -> None:
    """Of any layout and dtype, and larger than a chunk."""
    memory = WeightMemory()
    sources = [
        random(3, 5),
        random(7, 9).T,
        random(33).bfloat16(),
        torch.zeros(CHUNK + 1, dtype=torch.uint8),
        random(2),
    ]
    held = [memory.hold(source) for source in sources]
    for source, copy in zip(sources, held, strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
        assert copy.is_contiguous() and copy.data_ptr() % LINE == 0 and copy.data_ptr() != source.data_ptr()


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells of mappings")
def test_the_memory_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    held = WeightMemory().hold(random(64, 64))
    flags = re.search(r"^VmFlags:(.*)$", mapping_of(held) or "", re.MULTILINE)
    assert flags and "hg" in flags.group(1).split()


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells of mappings")
def test_the_memory_goes_with_its_last_tensor() -> None:
    memory = WeightMemory()
    first, second = memory.hold(random(64, 64)), memory.hold(torch.ones(CHUNK, dtype=torch.uint8))
    resident = resident_pages()
    del memory, second
    gc.collect()
    assert resident - resident_pages() > CHUNK // mmap.PAGESIZE // 2
    assert first.isfinite().all()


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
