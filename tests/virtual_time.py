"""An event loop whose clock jumps to the next timer whenever its sockets are silent: tests neither wait nor race.

Knows nothing about what runs on it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
GRACE = 0.001  # real seconds in which loopback bytes may still arrive


class JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer: it hands the wait to `skipped` instead."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        ready = super().select(GRACE if timeout is not None else 1.0)
        if not ready and timeout is not None:
            self.skipped += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = JumpingSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.skipped


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine on a loop of its own, in virtual seconds."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
