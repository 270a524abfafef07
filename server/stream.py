"""Stream: rows of a set of submits on their way to the one who reads them, bounded by the reader's pace.

Knows neither the pipe nor who reads; client.py fills it and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from server.engine.messages import Row, Submit


class Stream:
    """What the engine says about a set of submits, one list of rows for each time the reader comes."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.ids = tuple(submit.id for submit in submits)
        self.sequences = sum(max(submit.params.n, submit.params.best_of or 0) for submit in submits)
        self.open = {(submit.id, choice) for submit in submits for choice in range(submit.params.n)}
        self.started = False
        self.is_stopping = False
        self._rows: list[Row] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def push(self, row: Row) -> None:
        self.started = True
        self._rows.append(row)
        if row.finish is not None:
            self.open.discard((row.id, row.choice))
        self._wake()

    def end(self) -> None:
        """Nothing more is wanted. An error that was raised holds, by its traceback, the stream that holds it."""
        self.open.clear()
        self._rows.clear()
        self._error = None

    def cut(self, error: Exception) -> None:
        """End with an error once the rows that are already here have been read."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def unread(self) -> int:
        return len(self._rows)

    def __aiter__(self) -> AsyncIterator[list[Row]]:
        return self

    async def __anext__(self) -> list[Row]:
        """Rows since the last call, at least one; StopAsyncIteration after the last choice has finished."""
        while not self._rows:
            if not self.open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        rows, self._rows = self._rows, []
        return rows
