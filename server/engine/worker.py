"""The engine process: messages in, steps out, over one pipe.

Knows no HTTP. It ends on Shutdown or when the pipe does, and says on the pipe why it ended otherwise.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector

import torch

from model.config import ConfigError
from model.safetensors_header import WeightsError
from server.engine.compiling import Compiling
from server.engine.core import Engine
from server.engine.facts import EngineConfig
from server.engine.messages import (
    Abort,
    Admitted,
    Crashed,
    FromEngine,
    Query,
    Ready,
    Shutdown,
    Submit,
)
from server.engine.runner import is_out_of_memory
from server.engine.startup import build_engine
from server.engine.wire import from_bytes, to_bytes

ENDS = "the engine is shutting down"


class PipeClosedError(Exception):
    """The other end is gone: there is nobody left to serve."""


def run(conn: Connection, config: EngineConfig) -> None:
    """Main of the spawned process. Exit code 1 after Crashed.

    The parent decides when to stop, so the terminal's signals are ignored here. GOMP_SPINCOUNT must be in the
    environment before the spawn: OpenMP reads it once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        engine = build_engine(config, lambda progress: _send(conn, progress))
        _send(conn, Ready(engine.info))
        Worker(conn, engine).serve()
    except PipeClosedError:
        return
    except Exception as error:
        _say_why(conn, error)
        sys.exit(1)


def _send(conn: Connection, message: FromEngine) -> None:
    try:
        conn.send_bytes(to_bytes(message))
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PipeClosedError from error


def _say_why(conn: Connection, error: Exception) -> None:
    try:
        _send(conn, Crashed(explain(error), traceback.format_exc()))
    except PipeClosedError:
        traceback.print_exc()


def explain(error: Exception) -> str:
    """One line for the operator."""
    line = " ".join(str(error).split())
    if isinstance(error, (ConfigError, WeightsError, OSError)):
        return line
    if is_out_of_memory(error):
        return f"not enough memory: {line}"
    return f"the engine failed: {type(error).__name__}: {line}"


class Worker:
    """The loop: take what the pipe holds, do one step, send what it brought."""

    def __init__(self, conn: Connection, engine: Engine) -> None:
        self._conn = conn
        self._engine = engine
        engine.on_admission = lambda ids: _send(conn, Admitted(ids))
        self._compiling = Compiling(engine.grammars) if engine.grammars is not None else None
        self._ends_at: float | None = None  # set once Shutdown came
        self._readable = DefaultSelector()
        self._readable.register(conn, EVENT_READ, self._receive)
        if self._compiling is not None:
            self._readable.register(self._compiling.wake, EVENT_READ, self._add_compiled)

    def serve(self) -> None:
        while self._ends_at is None or (self._has_work and time.monotonic() < self._ends_at):
            self._take_in()
            if self._engine.has_work:
                _send(self._conn, self._engine.step())
        self._drop_rest()

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or bool(self._compiling)

    def _take_in(self) -> None:
        """Handle all that has come; wait for something (at most until a shutdown's end) if there is nothing to do."""
        seconds = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
        if self._engine.has_work:
            seconds = 0.0
        while ready := self._readable.select(seconds):
            for key, _ in ready:
                key.data()
            seconds = 0.0

    def _receive(self) -> None:
        try:
            message = from_bytes(self._conn.recv_bytes())
        except (EOFError, OSError) as error:  # OSError: reset, or cut in the middle of a message
            raise PipeClosedError from error
        self._handle(message)

    def _add_compiled(self) -> None:
        assert self._compiling is not None
        for submit in self._compiling.take():
            self._engine.add(submit)

    def _handle(self, message: object) -> None:
        match message:
            case Submit() if self._ends_at is not None:
                self._engine.refuse(message.id, ENDS)
            case Submit() if message.grammar is not None and self._compiling is not None:
                self._compiling.start(message)
            case Submit():
                self._engine.add(message)
            case Abort():
                self._engine.abort(message)
                if self._compiling:
                    self._compiling.drop(message.ids)
            case Query():
                _send(self._conn, self._engine.query(message))
            case Shutdown():
                self._ends_at = time.monotonic() + message.deadline
            case _:
                raise TypeError(f"unknown message on the pipe: {message!r}")

    def _drop_rest(self) -> None:
        """The deadline has passed: end what still runs, and say so."""
        for submit in self._compiling.drop_all() if self._compiling else ():
            self._engine.refuse(submit.id, ENDS)
        self._engine.abort(Abort(self._engine.request_ids(), "drain"))
        while self._engine.has_work:
            _send(self._conn, self._engine.step())
