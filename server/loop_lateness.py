"""How late the event loop is: every stream and probe waits at least that long.

A sleeper that notes by how much each of its naps was overslept. Knows the loop, nothing that runs on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NAP = 0.05
"""Seconds between two looks, each of which wakes the process."""


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Runs until cancelled. observe: seconds overslept, 0 or more."""
    loop = asyncio.get_running_loop()

    while True:
        due = loop.time() + NAP
        await asyncio.sleep(NAP)
        observe(max(0.0, loop.time() - due))
