"""Sends conversations, closed loop or open loop, and hands over one record a request.

Knows when to send and how a failure is named; knows nothing about figures or reports.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from server.loadtest.api import Api, Message
from server.loadtest.http import HttpClient, HttpError
from server.loadtest.record import Record
from server.loadtest.stream import CompletionReply
from server.loadtest.workload import Conversation, Turn

Sink = Callable[[Record], None]


@dataclass(slots=True)
class Target:
    """One server under test, and the state of what is under way there."""

    client: HttpClient
    api: Api
    timeout: float
    in_flight: int = 0
    serial: Iterator[int] = field(default_factory=count)

    async def send(self, turn: Turn, history: list[Message], intended: float, keep_text: bool = False) -> Record:
        """One request from its intended moment to its end. Returns a failed record rather than raise."""
        record = Record(next(self.serial), intended)
        reply = CompletionReply(record, keep_text)
        body = self.api.body(turn, history)
        self.in_flight += 1
        record.sent = self.client.clock()
        try:
            async with asyncio.timeout(self.timeout):
                tag = f"X-Request-Id: bench-{record.index}\r\n"
                await self.client.exchange("POST", self.api.path, body, reply, record, tag)
        except TimeoutError:
            record.fail("timeout", f"no end within {self.timeout:g} s")
        except HttpError as error:
            record.fail(error.kind, str(error))
        finally:
            self.in_flight -= 1
            record.end = self.client.clock()
            reply.settle()
        return record


async def converse(target: Target, conversation: Conversation, intended: float, sink: Sink) -> None:
    """The turns of one conversation, each after the reply to the one before; a failed turn ends it."""
    history: list[Message] = []
    several = len(conversation.turns) > 1
    for number, turn in enumerate(conversation.turns):
        if number:
            intended = target.client.clock() + turn.think
            await asyncio.sleep(turn.think)
        record = await target.send(turn, history, intended, keep_text=several)
        sink(record)
        if not record.ok:
            return
        history += [{"role": "user", "content": str(turn.prompt)}, {"role": "assistant", "content": record.text}]


async def closed_loop(
    target: Target, work: Iterator[Conversation], users: int, sink: Sink, requests: int | None, seconds: float | None
) -> None:
    """`users` at once, each starting anew as soon as it is done, until `requests` conversations or `seconds` are over.

    What is under way at the end is awaited and counted. Intended = the moment the user became free.
    """
    clock = target.client.clock
    deadline = clock() + seconds if seconds is not None else float("inf")
    left = iter(range(requests)) if requests is not None else count()

    async def user() -> None:
        while clock() < deadline and next(left, None) is not None:
            conversation = next(work, None)
            if conversation is None:
                return
            await converse(target, conversation, clock(), sink)

    await asyncio.gather(*(user() for _ in range(users)))


async def open_loop(
    target: Target,
    work: Iterator[Conversation],
    offsets: array[float],
    sink: Sink,
    most: int,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Starts a conversation at each offset whatever the server does; returns how often `most` in flight held one back.

    `stop`, asked before each start and each tenth of a second after the last, ends the run at once: what is still
    under way is dropped unrecorded.
    """
    clock = target.client.clock
    begin, held_back = clock(), 0
    running: set[asyncio.Task[None]] = set()
    for offset in offsets:
        await asyncio.sleep(begin + offset - clock())
        if len(running) >= most:
            held_back += 1
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        conversation = next(work, None)
        if conversation is None or stop():
            break
        task = asyncio.create_task(converse(target, conversation, begin + offset, sink))
        running.add(task)
        task.add_done_callback(running.discard)
    await _drain(running, stop)
    return held_back


async def _drain(running: set[asyncio.Task[None]], stop: Callable[[], bool]) -> None:
    while running and not stop():
        done, _ = await asyncio.wait(set(running), timeout=0.1)
        for task in done:
            task.result()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
