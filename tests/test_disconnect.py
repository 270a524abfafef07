"""Event streams: whichever write a client does not take, it is let go in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.disconnect import EventStream

WRITES = 4  # two events, the end mark, the end of the body


@pytest.mark.parametrize("stuck_at", range(WRITES))
def test_a_write_that_does_not_go_through_ends_the_response(stuck_at: int) -> None:
    bodies: list[bytes] = []
    slow: list[bool] = []

    async def events() -> AsyncIterator[str]:
        for event in ("data: 1\n\n", "data: 2\n\n"):
            yield event

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if len(bodies) == stuck_at:
                await asyncio.Event().wait()
            bodies.append(message["body"])

    async def scenario() -> None:
        stream = EventStream(events(), write_timeout=0.05, on_slow=lambda: slow.append(True))
        await asyncio.wait_for(stream({"type": "http"}, receive, send), timeout=30)

    asyncio.run(scenario())
    assert slow == [True] and bodies == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"][:stuck_at]
