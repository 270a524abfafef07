"""The engine as a real spawned process behind a real pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from server.engine.facts import EngineConfig
from server.engine.messages import (
    Abort,
    Admitted,
    Answer,
    Crashed,
    Progress,
    Query,
    Ready,
    Row,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
)
from server.engine.wire import from_bytes
from server.engine.worker import run

SPAWN = multiprocessing.get_context("spawn")
LIMIT = 60.0
"""Seconds after which a silent worker fails the test."""


class Worker:
    def __init__(self, config: EngineConfig) -> None:
        self.conn: Connection
        self.conn, child = SPAWN.Pipe()
        self.process: SpawnProcess = SPAWN.Process(target=run, args=(child, config), daemon=True)
        self.process.start()
        child.close()

    def receive(self) -> object:
        assert self.conn.poll(LIMIT), "the worker is silent"
        return from_bytes(self.conn.recv_bytes())

    def ready(self) -> Ready:
        while True:
            message = self.receive()
            if isinstance(message, Ready):
                return message
            assert isinstance(message, Progress), message

    def rows_until_finished(self, *ids: str) -> list[Row]:
        """The counters that come with them never fall."""
        rows: list[Row] = []
        made = 0
        while not set(ids) <= {row.id for row in rows if row.finish}:
            message = self.receive()
            assert isinstance(message, StepOutput | Admitted), message
            if isinstance(message, StepOutput):
                assert message.stats.generation_tokens >= made
                made = message.stats.generation_tokens
                rows += message.rows
        return rows

    def submit(self, request_id: str, prompt: bytes, max_tokens: int = 6) -> None:
        self.conn.send(Submit(request_id, Submit.pack(list(prompt)), SamplingParams(max_tokens, temperature=0)))

    def exit_code(self) -> int | None:
        self.process.join(LIMIT)
        return self.process.exitcode

    def close(self) -> None:
        self.conn.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> EngineConfig:
    return EngineConfig(str(tiny_model()), device="cpu", page_size=4, kv_cache_memory=1 << 20, threads=1)


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def begin(**changes: object) -> Worker:
        workers.append(Worker(replace(config, **changes)))  # type: ignore[arg-type]
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def test_serves_aborts_answers_and_shuts_down(start: Callable[..., Worker]) -> None:
    worker = start()
    info = worker.ready().info
    assert info.kv_bytes_predicted == info.kv_bytes_allocated == 1 << 20
    assert 0 < info.kv_bytes_resident <= info.kv_bytes_allocated
    assert [name for name, _ in info.phases] == ["kernels", "load", "allocate", "warm_up"]
    assert info.pid == worker.process.pid and info.threads == 1

    worker.submit("one", b"hello")
    rows = worker.rows_until_finished("one")
    assert sum(len(row.tokens) for row in rows) == 6 and rows[-1].finish == "length"

    worker.submit("long", b"endless", max_tokens=400)
    assert worker.receive() == Admitted(("long",))
    worker.conn.send(Abort(("long", "never-was")))
    assert worker.rows_until_finished("long")[-1].finish == "abort"

    worker.conn.send(Query(7, "kv_summary"))
    answer = worker.receive()
    assert isinstance(answer, Answer) and answer.id == 7 and answer.error is None
    assert isinstance(answer.value, dict) and answer.value["groups"][0]["active"] == 0

    worker.conn.send(Query(8, "no_such_view"))
    answer = worker.receive()
    assert isinstance(answer, Answer) and "kv_summary" in str(answer.error)

    worker.conn.send(Shutdown())
    assert worker.exit_code() == 0


def test_a_request_is_told_that_its_turn_has_come_before_its_prompt_is_computed(start: Callable[..., Worker]) -> None:
    """Else its time in the queue would go on through a long prefill."""
    worker = start(max_num_seqs=1, max_num_batched_tokens=16)
    worker.ready()
    worker.submit("first", bytes(range(60)), max_tokens=2)
    worker.submit("second", bytes(range(60, 90)), max_tokens=1)
    news: list[str] = []
    while "second's token" not in news:
        message = worker.receive()
        if isinstance(message, Admitted):
            news += message.ids
        elif isinstance(message, StepOutput):
            news += [f"{row.id}'s token" for row in message.rows] or ["step"]
    assert news == ["first", *["step"] * 3, "first's token", "first's token", "second", "step", "second's token"]


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ready()
    worker.submit("running", b"abc", max_tokens=40)
    worker.receive()
    worker.conn.send(Shutdown(deadline=LIMIT))
    worker.submit("late", b"abc")
    rows = worker.rows_until_finished("running", "late")
    assert {row.id: row.finish for row in rows if row.finish} == {"running": "length", "late": "error"}
    assert worker.exit_code() == 0


def test_shutdown_without_time_ends_what_runs(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ready()
    worker.submit("running", b"abc", max_tokens=400)
    worker.receive()
    worker.conn.send(Shutdown())
    assert worker.rows_until_finished("running")[-1].finish == "abort"
    assert worker.exit_code() == 0


def test_signals_are_the_parents_business(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ready()
    assert worker.process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    worker.submit("one", b"hello")
    assert worker.rows_until_finished("one")[-1].finish == "length"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.fault
def test_ends_when_the_pipe_does(start: Callable[..., Worker], busy: bool) -> None:
    worker = start()
    worker.ready()
    if busy:
        worker.submit("long", b"abc", max_tokens=500)
        worker.receive()
    worker.conn.close()
    assert worker.exit_code() == 0


PARENT = """
import multiprocessing, sys, time
from server.engine.facts import EngineConfig
from server.engine.messages import Ready, SamplingParams, Submit
from server.engine.worker import run
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    config = EngineConfig(sys.argv[1], "cpu", threads=1, kv_cache_memory=1 << 20)
    process = spawn.Process(target=run, args=(there, config))
    process.start()
    there.close()
    while not isinstance(here.recv(), Ready):
        pass
    here.send(Submit("long", Submit.pack([1, 2, 3]), SamplingParams(500)))
    here.recv()
    print(process.pid, flush=True)
    while True:
        here.recv()
"""


@pytest.mark.fault
def test_a_killed_parent_leaves_no_engine_behind(config: EngineConfig, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).parent.parent)
    command, path = [sys.executable, str(script), config.model], os.environ | {"PYTHONPATH": root}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + LIMIT
    while is_running(engine):
        assert time.monotonic() < deadline, "the engine outlived its parent"


def is_running(pid: int) -> bool:
    """Not yet gone; a zombie that nobody reaps counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_load_error_crosses_the_pipe_and_the_exit_code_tells(start: Callable[..., Worker], tmp_path: Path) -> None:
    worker = start(model=str(tmp_path / "nowhere"))
    assert "nowhere" in crash_of(worker).text
    assert worker.exit_code() == 1


def crash_of(worker: Worker) -> Crashed:
    while True:
        message = worker.receive()
        if isinstance(message, Crashed):
            return message
        assert isinstance(message, Progress), message


@pytest.mark.fault
def test_an_engine_fault_is_told_with_its_traceback(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ready()
    worker.conn.send("not a message")
    crash = crash_of(worker)
    assert "unknown message" in crash.text and "Traceback" in crash.detail
    assert worker.exit_code() == 1
