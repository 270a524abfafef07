"""The engine in a process of its own behind its pipe, as a server has it, without a server: this process is the client.

Knows no device; the process measures the bare loop on the same recordings before it serves.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from server.engine.messages import Admitted, SamplingParams, Shutdown, StepOutput, Submit
from server.engine.wire import from_bytes
from server.engine.worker import PipeClosedError, Worker
from tests.gpu.steps import decode_seconds, rig_of
from tests.gpu.visit import Visit

REST = 32
"""Tokens that a request goes on for after its time was taken, so that none ends before."""


class EngineProcess:
    """Ready on entering: bare_seconds of one step by hand, for each number of streams."""

    def __init__(self, visit: Visit, name: str, streams: tuple[int, ...], prompt: int, steps: int) -> None:
        """name: of the model's shape. Every request has a prompt of `prompt` tokens and then decodes steps + REST."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, visit, name, streams, prompt, steps), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        self.bare_seconds: list[float] = self._pipe.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(Shutdown())
        self._pipe.close()
        self._process.join(30)
        self._process.kill()

    def step_seconds(self, rows: int, prompt: int, steps: int) -> float:
        """Seconds in which each of `rows` streams gets a token, from when all of them decode, over `steps` tokens."""
        params = SamplingParams(steps + REST, temperature=0)
        for index in range(rows):
            self._pipe.send(Submit(f"{rows} {index}", Submit.pack([index + 1] * prompt), params))
        waiting, left = {f"{rows} {index}" for index in range(rows)}, rows
        started, counted = 0.0, 0
        while left:
            output = from_bytes(self._pipe.recv_bytes())
            if isinstance(output, Admitted):
                continue
            assert isinstance(output, StepOutput), output
            if not waiting and counted < rows * steps:
                counted += sum(len(row.tokens) for row in output.rows)
                ended = time.perf_counter()
            if waiting and not (waiting := waiting - {row.id for row in output.rows if row.tokens}):
                started = time.perf_counter()
            left -= sum(row.finish is not None for row in output.rows)
        return (ended - started) / (counted / rows)


def serve(pipe: Connection, visit: Visit, name: str, streams: tuple[int, ...], prompt: int, steps: int) -> None:
    """The process: time the bare loop, say so, then serve until told to end."""
    torch.set_num_threads(1)
    longest = prompt + steps + 2 * REST
    rig = rig_of(visit, name, max(streams) * longest, max(streams), longest)
    graphs = rig.graphs()
    bare = [decode_seconds(rig, graphs, rows, prompt + steps // 2) for rows in streams]
    engine = rig.warm_engine(graphs)
    pipe.send(bare)
    with contextlib.suppress(PipeClosedError):
        Worker(pipe, engine).serve()
