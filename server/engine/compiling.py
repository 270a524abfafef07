"""Requests whose grammar is being compiled: off the engine's loop, in one thread, in the order in which they came.

Knows messages and grammars, not what the engine does with them. llguidance frees the interpreter lock meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from server.engine.grammar import Grammars
from server.engine.messages import GrammarSpec, Submit


class Compiling:
    """wake becomes readable when a submit is done; take() hands out what is done."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._pending: list[tuple[Submit, Future[None]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ropeway-grammar")
        self.wake: Connection
        self.wake, self._signal = Pipe(duplex=False)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def start(self, submit: Submit) -> None:
        assert submit.grammar is not None
        future = self._thread.submit(self._compile, submit.grammar)
        self._pending.append((submit, future))
        future.add_done_callback(lambda future: self._signal.send_bytes(b"done"))

    def _compile(self, grammar: GrammarSpec) -> None:
        """What is wrong with a grammar the engine will find again, and tell."""
        with contextlib.suppress(ValueError):
            self._grammars.matcher(grammar)

    def take(self) -> list[Submit]:
        """Submits that are compiled, in order: nobody overtakes, so that every rank sees the same."""
        while self.wake.poll():
            self.wake.recv_bytes()
        done = 0
        while done < len(self._pending) and self._pending[done][1].done():
            done += 1
        taken, self._pending = self._pending[:done], self._pending[done:]
        return [submit for submit, _ in taken]

    def drop(self, ids: Collection[str]) -> None:
        """Forget submits that were aborted."""
        self._pending = [(submit, future) for submit, future in self._pending if submit.id not in ids]

    def drop_all(self) -> list[Submit]:
        dropped, self._pending = [submit for submit, _ in self._pending], []
        return dropped
