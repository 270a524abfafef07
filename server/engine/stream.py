"""A device's queue as the runner sees it: copies that nobody waits for, and marks to wait on.

Knows bytes and their order; no batches and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; every tensor of an upload begins at a multiple, so that kernels may load it in the widest words."""


class Mark(Protocol):
    """A place in the queue."""

    def synchronize(self) -> None:
        """Wait until everything before it is done."""


class Stream(Protocol):
    """What is issued runs in order, perhaps later."""

    device: torch.device

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors on the device, by one copy."""
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """A copy on the host, to be read once a later mark is reached."""
        ...

    def mark(self) -> Mark:
        """The end of what has been issued so far."""
        ...


class Reached:
    """A mark with nothing before it."""

    def synchronize(self) -> None:
        return


class HostStream:
    """The CPU: everything is where it is needed, and done when it is issued."""

    device = torch.device("cpu")

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def mark(self) -> Mark:
        return Reached()


class StagedStream:
    """Uploads are gathered in a staging buffer and cross in one copy.

    Every upload takes a buffer of its own: torch's allocator of pinned memory hands it out again only when the copy
    from it is done.
    """

    pinned = False

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def staging(self, nbytes: int) -> Tensor:
        """[N] u8 on the host, to be filled and sent."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)

    def send(self, staged: Tensor, into: Tensor) -> None:
        """staged [N] u8 to the first N bytes of into, a buffer on the device."""
        into[: len(staged)].copy_(staged, non_blocking=True)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts = places(tensors)
        staged = self.staging(starts[-1])
        for tensor, view in zip(tensors, _views(staged, starts, tensors), strict=True):
            view.copy_(tensor)
        return _views(staged.to(self.device, non_blocking=True), starts, tensors)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True, copy=True)  # into pinned memory if it comes from a GPU

    def mark(self) -> Mark:
        return Reached()


def places(tensors: Sequence[Tensor]) -> list[int]:
    """The first byte of each tensor in one buffer, and at the end how many bytes all of them take."""
    return list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))


def _views(buffer: Tensor, starts: list[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
