"""Stream: rows of a set of submits on their way to the one who takes them, at the taker's pace.

Knows neither the pipe nor who takes; client.py fills it and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from server.engine.messages import Row, Submit

Busy = asyncio.Future[None] | None
"""What has to be over before more can be taken; None: nothing."""
Take = Callable[[list[Row]], Busy]


class SlowReaderError(Exception):
    """The client does not take what is written."""


def drop(rows: list[Row]) -> None:
    """The taker of a stream that is over."""


class Stream:
    """What the engine says about a set of submits: `take` is called with the rows of each step, as they come.

    While a taker is busy its rows wait, and come in one list. What it raises, or what its being busy ends with, ends
    the stream.
    """

    def __init__(self, submits: Sequence[Submit], take: Take) -> None:
        self.ids = tuple(submit.id for submit in submits)
        self.tenant = submits[0].tenant
        self.sequences = sum(max(submit.params.n, submit.params.best_of or 0) for submit in submits)
        self.open = {(submit.id, choice) for submit in submits for choice in range(submit.params.n)}
        self.started = False
        self.is_stopping = False
        self._take = take
        self._busy: Busy = None
        self._rows: list[Row] = []
        self._error: BaseException | None = None
        self._over: asyncio.Future[None] | None = None

    def push(self, row: Row) -> None:
        """Call hand_on once all rows of a step are here."""
        self.started = True
        self._rows.append(row)
        if row.finish is not None:
            self.open.discard((row.id, row.choice))

    def hand_on(self) -> None:
        if self._rows and self._busy is None:
            rows, self._rows = self._rows, []
            try:
                self._busy = self._take(rows)
            except Exception as error:
                self._fail(error)
            if self._busy is not None:
                self._busy.add_done_callback(self._go_on)
        self._tell_if_over()

    def _go_on(self, done: asyncio.Future[None]) -> None:
        self._busy = None
        if not done.cancelled() and (error := done.exception()) is not None:
            self._fail(error)
        self.hand_on()

    @property
    def unread(self) -> int:
        return len(self._rows)

    async def wait(self) -> None:
        """Until the rows of all choices are taken; raises what the taker raised, or what the stream was cut with."""
        if not self._is_over:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        if self._error is not None:
            raise self._error

    @property
    def _is_over(self) -> bool:
        return not self._rows and (not self.open or self._error is not None)

    def _tell_if_over(self) -> None:
        if self._over is not None and not self._over.done() and self._is_over:
            self._over.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Nobody takes what comes from now on."""
        self._rows.clear()
        self._take, self._error = drop, error

    def cut(self, error: Exception) -> None:
        """End with an error once the rows that are already here have been taken."""
        if self._error is None and self.open:
            self._error = error
        self._tell_if_over()

    def end(self) -> None:
        """Nothing more is wanted. An error that was raised, and a taker, may hold the stream that holds them."""
        self.open.clear()
        self._rows.clear()
        self._take, self._error = drop, None
