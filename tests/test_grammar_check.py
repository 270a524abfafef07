"""Grammars on trial: whoever leaves in the middle takes the verdict along, so that the next one gets its own."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import grammar_check
from server.engine.messages import GrammarSpec
from server.grammar_check import GrammarCheck
from tests.conftest import VOCAB_SIZE, LiveServer, write_tokenizer
from tests.scripted_server import launch

pytest.importorskip("llguidance")

EXPLODES = "(a{1000}){1000}b"
"""Takes seconds to refuse, so whoever sent it is gone before there is a verdict."""


def spec(part: dict[str, str]) -> GrammarSpec:
    return GrammarSpec("grammar", json.dumps({"grammars": [part]}))


async def verdict(check: GrammarCheck, part: dict[str, str]) -> str:
    try:
        return (await check.checked(spec(part))).text
    except ValueError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.fault
def test_who_leaves_takes_the_verdict_along(tmp_path: Path, is_running: bool) -> None:
    """While the process starts, and while it has the question."""
    write_tokenizer(tmp_path)
    fine, wrong = {"ebnf": 'root ::= "for-b"'}, {"lark_grammar": "start: (((("}

    async def test() -> None:
        check = GrammarCheck(tmp_path, VOCAB_SIZE)
        if is_running:
            await check.checked(spec({"lark_grammar": 'start: "warm"'}))
        leaver = asyncio.create_task(check.checked(spec({"ebnf": 'root ::= "a"'})))
        await asyncio.sleep(0)  # it asks
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        try:
            assert (await verdict(check, wrong)).startswith("refused: ")
            assert "for-b" in await verdict(check, fine)
        finally:
            check.close()

    asyncio.run(test())


WARM, FINE = {"lark_grammar": 'start: "warm"'}, {"ebnf": 'root ::= "fine"'}


def process_of(check: GrammarCheck) -> BaseProcess:
    """The one that tries grammars out, which runs once the first has its verdict."""
    asyncio.run(check.checked(spec(WARM)))
    [process] = [child for child in multiprocessing.active_children() if child.name == "ropeway-grammar"]
    return process


@pytest.fixture
def check(tmp_path: Path) -> Iterator[GrammarCheck]:
    write_tokenizer(tmp_path)
    check = GrammarCheck(tmp_path, VOCAB_SIZE)
    yield check
    check.close()


def test_a_busy_machine_refuses_no_good_grammar(check: GrammarCheck) -> None:
    """The process gets no core for longer than a grammar may compute."""
    pid = process_of(check).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    async def test() -> None:
        asyncio.get_running_loop().call_later(1.2, os.kill, pid, signal.SIGCONT)
        assert "fine" in await verdict(check, FINE)

    asyncio.run(test())


def test_what_computes_for_too_long_is_ended_and_refused_without_another_try(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "CPU_SECONDS", 0.1)
    process = process_of(check)
    for _ in range(2):
        assert "too complex" in asyncio.run(verdict(check, {"lark_grammar": f"start: /{EXPLODES}/"}))
        assert process.exitcode == -signal.SIGPROF and multiprocessing.active_children() == []


def test_what_hangs_is_ended_and_nothing_is_kept_against_the_grammar(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = process_of(check).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as shorter, pytest.raises(TimeoutError, match="send it again"):
        shorter.setattr(grammar_check, "HANG_SECONDS", 0.1)
        asyncio.run(check.checked(spec(FINE)))
    assert "fine" in asyncio.run(verdict(check, FINE))


def test_a_process_that_something_else_has_ended_is_no_verdict(check: GrammarCheck) -> None:
    process = process_of(check)
    process.kill()
    process.join()
    assert "fine" in asyncio.run(verdict(check, FINE))


@pytest.fixture
def live(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[LiveServer]:
    server = launch(tiny_model(), tmp_path / "server.log")
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()


def asking(regex: str) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 3, "structured_outputs": {"regex": regex}}


def answered(live: LiveServer, regex: str) -> tuple[int, str]:
    response = httpx.post(f"{live.url}/v1/completions", json=asking(regex), timeout=60)
    return response.status_code, response.text


@contextmanager
def sent(live: LiveServer, regex: str) -> Iterator[None]:
    """Hangs up at the end of the block."""
    content = json.dumps(asking(regex)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def children(live: LiveServer) -> list[int]:
    text = Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@pytest.mark.skipif(not Path(f"/proc/{os.getpid()}/task").exists(), reason="reads /proc to see who computes")
@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.fault
def test_a_client_that_hangs_up_while_its_grammar_is_tried(live: LiveServer, is_running: bool) -> None:
    before = children(live)
    if is_running:
        assert answered(live, "warm")[0] == 200
        [process] = set(children(live)) - set(before)
        idle = cpu_ticks(process)
    with sent(live, EXPLODES):
        until(lambda: cpu_ticks(process) > idle if is_running else children(live) != before)
    assert answered(live, "b")[0] == 200
    status, text = answered(live, "(unclosed")
    assert status == 400 and "unclosed" in text
    assert answered(live, EXPLODES)[0] == 400
