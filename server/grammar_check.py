"""Grammars are tried out before they reach the engine: in a process of its own, which is killed when time is up.

A schema can be small and its automaton huge; what explodes here costs its own request a second and nobody else any.
Knows no requests: a grammar comes in, the same one in its final form or a ValueError comes out.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import signal
from collections import OrderedDict
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from server.engine.grammar import MISSING, Grammars, finished, is_available
from server.engine.messages import GrammarSpec

CPU_SECONDS = 0.8
"""The most that a grammar may cost: of the process's own time, since a busy machine says nothing of a grammar."""
HANG_SECONDS = 30.0
"""By the clock on the wall, for what neither computes nor answers: the next one waits behind it."""
START_SECONDS = 120.0
KEPT = 256
READY = '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'
WALK = 12
"""Steps into the grammar that are tried: what explodes often does so behind its first token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """text: the final form, None where it is the one that was sent."""

    text: str | None = None
    error: str | None = None


TOO_COMPLEX = Verdict(error=f"the grammar is too complex: it took more than {CPU_SECONDS:g} s to prepare; simplify it")


class GrammarCheck:
    """The process is started by the first grammar, one at a time is tried, verdicts are kept."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._turn = asyncio.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    async def checked(self, spec: GrammarSpec) -> GrammarSpec:
        """The grammar as the engine reads it. ValueError: what is wrong with it. TimeoutError: nobody knows yet."""
        if not is_available():
            raise ValueError(MISSING)
        key = hashlib.sha256(spec.text.encode(errors="surrogatepass")).digest()
        async with self._turn:
            verdict = self._verdicts.pop(key, None) or await self._ask(spec.text)
            self._verdicts[key] = verdict
            while len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        if verdict.error is not None:
            raise ValueError(verdict.error)
        return spec if verdict.text is None else replace(spec, text=verdict.text)

    async def _ask(self, text: str) -> Verdict:
        """Whoever leaves before the answer, its client having gone, ends the process: the next one would read it."""
        if self._process is not None and not self._process.is_alive():
            self.close()  # something else ended it since: not this grammar's fault
        verdict = None
        try:
            connection = self._connection or await self._start()
            await asyncio.to_thread(connection.send, text)
            verdict = await answer(connection, HANG_SECONDS)
        except (EOFError, ConnectionError):
            return TOO_COMPLEX  # the grammar ended the process
        except TimeoutError:
            raise TimeoutError(f"the grammar was not tried out within {HANG_SECONDS:g} s; send it again") from None
        finally:
            if verdict is None:
                self.close()
        return verdict

    async def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(child_end, self._folder, self._vocab_size, CPU_SECONDS),
            name="ropeway-grammar",
            daemon=True,
        )
        self._process.start()
        child_end.close()
        try:
            await answer(self._connection, START_SECONDS)
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that tries grammars out did not start") from error
        return self._connection

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


async def answer(connection: Connection, seconds: float) -> Verdict:
    """TimeoutError if it takes longer, EOFError if none will come."""
    if not await asyncio.to_thread(connection.poll, seconds):
        raise TimeoutError
    verdict: Verdict = connection.recv()
    return verdict


def serve(connection: Connection, folder: Path, vocab_size: int, cpu_seconds: float) -> None:
    """Entry of the process: grammars in, verdicts out, until the pipe ends. The first verdict says that it is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grammars = Grammars(folder, vocab_size)
    connection.send(try_out(grammars, READY))
    while True:
        try:
            text = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # counts CPU time, and its signal ends the process
        verdict = try_out(grammars, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(verdict)


def try_out(grammars: Grammars, text: str) -> Verdict:
    """Compile it and walk a few steps into it."""
    try:
        final = finished(text)
        matcher = grammars.matcher(GrammarSpec("", final))
        for _ in range(WALK):
            allowed = matcher.mask().nonzero()[0]
            if matcher.is_complete or not len(allowed):
                break
            matcher.accept(int(allowed[len(allowed) // 2]))
    except Exception as error:  # the library's converter raises what it likes
        return Verdict(error=" ".join(str(error).split())[:500] or type(error).__name__)
    return Verdict(None if final == text else final, matcher.error)
