"""EngineClient: the engine process as the HTTP process sees it. Submit, stream, abort, deadlines, death.

Knows token ids and messages only: no text, no HTTP. The process and its pipe are engine_process.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from server.engine.facts import EngineConfig, EngineInfo, EngineStats
from server.engine.messages import (
    Abort,
    AbortReason,
    Admitted,
    Answer,
    Crashed,
    FromEngine,
    Progress,
    Query,
    Ready,
    StepOutput,
    Submit,
)
from server.engine_process import EngineMain, EngineProcess, Spawned, run_engine
from server.places import Places
from server.stream import Stream, Take

MAX_UNREAD_ROWS = 4096
"""Rows a stream may hold for a taker that is busy: far above any pause that a network makes."""


class EngineDeadError(Exception):
    """The engine process has ended; the text says why."""


class StreamCutError(Exception):
    """The stream was ended from this side, for `reason`."""

    def __init__(self, reason: AbortReason) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineClient:
    """Owns the engine process. All methods belong to the event loop that called `start`."""

    def __init__(
        self, config: EngineConfig, engine_main: EngineMain = run_engine, spawned: Spawned | None = None
    ) -> None:
        """spawned: the process to use, if it runs already."""
        self.config = config
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.failure: str | None = None
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_death: Callable[[str], None] = lambda text: None
        self.on_step: Callable[[StepOutput], None] = lambda output: None
        self.last_heard = time.monotonic()
        self._process = EngineProcess(engine_main, config, self._receive, self._die, spawned)
        self._streams: dict[str, Stream] = {}
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._query_ids = itertools.count()
        self._places = Places()
        self._unheard: list[tuple[str, int, bool]] = []  # who left before the engine took in that they had come
        self._closing = False

    async def start(self) -> EngineInfo:
        """Spawn the engine and wait until it can serve. EngineDeadError carries its one line if it cannot."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        await self._process.start()
        return await self._ready

    # ---- requests

    @property
    def limit(self) -> int:
        """Sequences that may run or wait at once; only waiting is open until the engine says how many it runs."""
        return (self.info.max_num_seqs if self.info is not None else 0) + self.config.max_queue

    @property
    def open_sequences(self) -> int:
        return sum(stream.sequences for stream in self._open_streams())

    def _open_streams(self) -> set[Stream]:
        return set(self._streams.values())

    @contextlib.asynccontextmanager
    async def stream(
        self, submits: Sequence[Submit], take: Take, timeout: float | None = None, queue_timeout: float | None = None
    ) -> AsyncIterator[Stream]:
        """Submit together; `take` gets the rows of each step. Leaving the block early aborts what still runs.

        timeout: seconds for everything; queue_timeout: seconds until its turn comes. Either ends the stream with
        StreamCutError. Raises QueueFullError, TooManyError or EngineDeadError before anything is sent.
        """
        stream = self._admit(submits, take)
        timers = self._arm(stream, timeout, queue_timeout)
        try:
            yield stream
        finally:
            for timer in timers:
                timer.cancel()
            self._close(stream)
            stream.end()

    def _admit(self, submits: Sequence[Submit], take: Take) -> Stream:
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        stream = Stream(submits, take)
        self._forget_unheard()
        self._places.enter(stream.tenant, stream.sequences, self.limit)
        if not self._streams:
            self.last_heard = time.monotonic()
        for submit in submits:
            self._streams[submit.id] = stream
            self._process.send(submit)
        return stream

    def _arm(self, stream: Stream, timeout: float | None, queue_timeout: float | None) -> list[asyncio.TimerHandle]:
        def expire(reason: AbortReason) -> None:
            if not (reason == "queue_timeout" and stream.started):
                self.abort(stream, reason)

        limits: list[tuple[float | None, AbortReason]] = [(timeout, "timeout"), (queue_timeout, "queue_timeout")]
        return [self._loop.call_later(seconds, expire, reason) for seconds, reason in limits if seconds is not None]

    def _close(self, stream: Stream, reason: AbortReason = "client") -> None:
        open_ids = tuple({id for id, _ in stream.open if id in self._streams})
        if open_ids and self.failure is None:
            self._process.send(Abort(open_ids, reason))
        known = [self._streams.pop(id, None) for id in stream.ids]
        if any(known):
            is_done = stream.started and (reason != "client" or not stream.open)
            self._unheard.append((stream.tenant, stream.sequences, is_done))
            self._forget_unheard()

    def _forget_unheard(self) -> None:
        """While the engine does not read, what those who left had sent fills memory as before, and so their places."""
        if not self._process.has_unread:
            for left in self._unheard:
                self._places.leave(*left)
            self._unheard.clear()

    def finish(self, stream: Stream, wait: bool = False) -> None:
        """End what still runs because its text is complete (a stop string was found). wait: last rows still come."""
        if not wait:
            self._close(stream, "stop_string")
            stream.end()
        elif stream.open and not stream.is_stopping:
            stream.is_stopping = True
            self._process.send(Abort(tuple({id for id, _ in stream.open}), "stop_string"))

    def finish_choices(self, choices: Sequence[tuple[str, int]]) -> None:
        """End these choices (request id, choice) because their text is complete; their siblings go on."""
        if self.failure is None:
            self._process.send(Abort((), "stop_string", tuple(choices)))

    def abort(self, stream: Stream, reason: AbortReason) -> None:
        """End what still runs; the taker gets the rows that came before, then StreamCutError ends the stream."""
        self._close(stream, reason)
        stream.cut(StreamCutError(reason))

    def abort_all(self, reason: AbortReason) -> None:
        for stream in self._open_streams():
            self.abort(stream, reason)

    async def query(self, kind: str, arg: object = None) -> Any:
        """The engine's answer between two steps. ValueError if it cannot answer, EngineDeadError if it is gone."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        id = next(self._query_ids)
        future = self._queries[id] = self._loop.create_future()
        self._process.send(Query(id, kind, arg))
        try:
            answer = await future
        finally:
            del self._queries[id]
        if answer.error is not None:
            raise ValueError(answer.error)
        return answer.value

    def is_stalled(self, seconds: float) -> bool:
        """Work is open and the engine has said nothing for this long."""
        return bool(self._streams) and time.monotonic() - self.last_heard > seconds

    # ---- messages from the engine, on the event loop

    def _receive(self, message: FromEngine) -> None:
        self.last_heard = time.monotonic()
        match message:
            case StepOutput():
                self._deliver(message)
            case Admitted(ids):
                for id in ids:
                    if (stream := self._streams.get(id)) is not None:
                        stream.started = True
            case Ready(info):
                self.info, self.stats = info, info.stats_at_start()
                if not self._ready.done():
                    self._ready.set_result(info)
            case Progress():
                self.on_progress(message)
            case Answer():
                if (asked := self._queries.get(message.id)) is not None and not asked.done():
                    asked.set_result(message)
            case Crashed(text):
                self._die(text)

    def _deliver(self, output: StepOutput) -> None:
        """From here a step goes on to the sockets, in this call."""
        self.stats = output.stats
        fed: dict[Stream, None] = {}
        for row in output.rows:
            if (stream := self._streams.get(row.id)) is not None:
                stream.push(row)
                fed[stream] = None
        for stream in fed:
            stream.hand_on()
            if stream.unread > MAX_UNREAD_ROWS:
                self.abort(stream, "slow_reader")
        self.on_step(output)  # last: a listener that fails costs no row

    def _die(self, text: str) -> None:
        """First reason wins: a crash message is followed by the end of the pipe."""
        if self.failure is not None or self._closing:
            return
        self.failure = text
        error = EngineDeadError(text)
        if not self._ready.done():
            self._ready.set_exception(error)
        for stream in self._open_streams():
            stream.cut(error)
        self._streams.clear()
        for future in self._queries.values():
            if not future.done():  # answered in the same breath, or its asker has gone
                future.set_exception(error)
        self.on_death(text)

    async def close(self, seconds: float = 2.0) -> None:
        """End the engine process: asked (unless it still loads and would not hear), then killed."""
        self._closing = True
        if self.info is None:
            seconds = 0.0
        await self._process.end(seconds)
