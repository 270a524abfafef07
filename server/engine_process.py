"""EngineProcess: the engine's process and the pipe to it, from spawn to kill.

Knows messages, not what they mean. The pipe is a transport of the event loop, which neither blocks in send nor wakes
more than once for a step: a thread that read it woke a second time and handed the interpreter lock over for each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple, cast

from server.engine.facts import EngineConfig
from server.engine.messages import FromEngine, Shutdown, ToEngine
from server.engine.wire import from_bytes, to_bytes

EngineMain = Callable[[Connection, EngineConfig], None]
CHILD_ENVIRONMENT = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "1"}
"""Idle threads spin about as long as Python takes between two operations (50 microseconds), then sleep.

Measured by model.ops.cpu.bench on two Zen 3 cores: at 1000 a thread sleeps before the next operation and wakes late,
which made a step 1.5 times as long; at 10000 a busy neighbour on one core costs more than a factor of two.
"""


def run_engine(connection: Connection, config: EngineConfig) -> None:
    """Entry of the engine process."""
    from server.engine.worker import run

    run(connection, config)


class Spawned(NamedTuple):
    """A process that waits for its config, and the end of the pipe to it."""

    process: SpawnProcess
    pipe: Connection


def spawn_engine(main: EngineMain = run_engine) -> Spawned:
    """Needs no config, so that torch loads while the model is looked for and this process loads what HTTP needs."""
    for name, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=enter, args=(main, child_end), name="ropeway-engine")
    start_deaf(process)
    child_end.close()
    return Spawned(process, pipe)


def enter(main: EngineMain, connection: Connection) -> None:
    """First lines of the spawned process."""
    if main is run_engine:
        import server.engine.worker  # noqa: F401
    try:
        config = connection.recv()
    except EOFError:  # the other end is gone before it knew what to serve
        return
    main(connection, config)


class EngineProcess(asyncio.Protocol):
    """on_message and on_end (with the reason) are called on the event loop that calls `start`."""

    def __init__(
        self,
        main: EngineMain,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
        spawned: Spawned | None = None,
    ) -> None:
        self._main, self._config, self._spawned = main, config, spawned
        self._on_message, self._on_end = on_message, on_end
        self._frames = Frames()
        self._process: SpawnProcess | None = None
        self._transport: asyncio.WriteTransport | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process, pipe = self._spawned or spawn_engine(self._main)
        self._pipe = pipe
        await self._loop.create_unix_connection(lambda: self, sock=socket.socket(fileno=os.dup(pipe.fileno())))
        self._write(self._config)

    @property
    def has_unread(self) -> bool:
        """Whether messages wait here because the engine, which reads between two steps, has not made room for them."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, message: ToEngine) -> None:
        """Never blocks; what is sent before `start` or after the end is lost."""
        self._write(message)

    def _write(self, message: ToEngine | EngineConfig) -> None:
        if self._transport is not None:
            self._transport.write(framed(message))

    async def end(self, seconds: float) -> None:
        """Ask it to end, kill it after `seconds`."""
        if self._process is not None:
            self.send(Shutdown())
            await asyncio.to_thread(end_process, self._process, seconds)

    # ---- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            try:
                self._on_message(message)
            except Exception as error:  # let through, it would end the transport and with it a healthy engine
                context = {"message": "a message of the engine could not be handled", "exception": error}
                self._loop.call_exception_handler(context)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine process is gone or going; how it ended is known when it has.

        A transport whose write fails stops reading: what the engine said before it went may still lie in the pipe.
        """
        self._transport = None
        with self._pipe, contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := os.read(self._pipe.fileno(), REST):
                self.data_received(data)
        threading.Thread(target=self._tell_end, name="ropeway-engine-end", daemon=True).start()

    def _tell_end(self) -> None:
        assert self._process is not None
        self._process.join()
        reason = f"the engine process ended unexpectedly ({describe_exit(self._process.exitcode)})"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_end, reason)


REST = 1 << 16
LENGTH = struct.Struct("!i")
"""What multiprocessing.Connection, which the engine process reads and writes with, puts before each message."""


def framed(message: ToEngine | EngineConfig) -> bytes:
    content = to_bytes(message)
    return LENGTH.pack(len(content)) + content


class Frames:
    """Bytes of a pipe, in pieces of any size, as messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[FromEngine]:
        """Messages that these bytes complete."""
        self._held += data
        start, messages = 0, list[FromEngine]()
        with memoryview(self._held) as held:
            while len(held) - start >= LENGTH.size:
                begin = start + LENGTH.size
                end = begin + LENGTH.unpack_from(held, start)[0]
                if end > len(held):
                    break
                messages.append(from_bytes(held[begin:end]))
                start = end
        del self._held[:start]
        return messages


def start_deaf(process: SpawnProcess) -> None:
    """Start a child that Ctrl-C in the terminal never reaches, not even before its own first line runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # its start unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_process(process: SpawnProcess, seconds: float) -> None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
    process.join()


def describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ": the machine may be out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {code}"
