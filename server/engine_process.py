"""EngineProcess: the engine's process and the pipe to it, from spawn to kill.

Knows messages, not what they mean. One reader and one writer thread hold the pipe, so that the event loop neither
blocks in send nor wakes more than once for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from server.engine.messages import EngineConfig, FromEngine, Shutdown, ToEngine

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


class EngineProcess:
    """on_message and on_end (with the reason) are called on the event loop that calls `start`."""

    def __init__(
        self,
        main: EngineMain,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._main, self._config = main, config
        self._on_message, self._on_end = on_message, on_end
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._process: SpawnProcess | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for name, value in CHILD_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=self._main, args=(child_end, self._config), name="ropeway-engine")
        start_deaf(self._process)
        child_end.close()
        threading.Thread(target=self._read, args=(self._process,), name="ropeway-reader", daemon=True).start()
        threading.Thread(target=self._write, name="ropeway-writer", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Never blocks; what is sent before `start` or after the end is lost."""
        self._outbox.put(message)

    def _read(self, process: SpawnProcess) -> None:
        try:
            while True:
                self._post(self._on_message, self._pipe.recv())
        except (EOFError, OSError):
            process.join()
            self._post(self._on_end, f"the engine process ended unexpectedly ({describe_exit(process.exitcode)})")

    def _post(self, callback: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, value)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a broken pipe is noticed, once, by the reader
            for message in iter(self._outbox.get, None):
                self._pipe.send(message)

    async def end(self, seconds: float) -> None:
        """Ask it to end, kill it after `seconds`."""
        if self._process is not None:
            self._outbox.put(Shutdown())
            self._outbox.put(None)
            await asyncio.to_thread(end_process, self._process, seconds)


def start_deaf(process: SpawnProcess) -> None:
    """Start a child that Ctrl-C in the terminal never reaches, not even before its own first line runs."""
    resource_tracker.ensure_running()  # its own start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
