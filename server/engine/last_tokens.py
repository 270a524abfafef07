"""The tokens that the last step sampled, still on the device: the next step begins with them before the host sees them.

Knows which row sampled for which sequence; nothing of what the tokens are for.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.engine.plan import PlanRow
from server.engine.request import Sequence

ON_HOST = -1
"""Source of a token that the host knows."""


class LastTokens:
    """ids [capacity] i64 keeps its address, so that a graph may read it."""

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._largest = vocab_size - 1
        self._index: dict[int, int] = {}  # id(sequence) -> where in ids its newest token is

    def sources(self, rows: list[PlanRow]) -> NDArray[np.int64]:
        """[B]: index in ids of the last token of each row, or ON_HOST."""
        return np.array([self._source(row) for row in rows], np.int64)

    def _source(self, row: PlanRow) -> int:
        """A sequence that lacked memory in a step not collected yet has no token to hand on: any will do."""
        return self._index.get(id(row.sequence), ON_HOST) if row.end > len(row.sequence.tokens) else ON_HOST

    def feed(self, token_ids: Tensor, source: Tensor) -> Tensor:
        """token_ids [B] i64, source [B] i64 -> token_ids with those that are on the device filled in."""
        return torch.where(source == ON_HOST, token_ids, self.ids.index_select(0, source.clamp(min=0)))

    def keep(self, pieces: list[tuple[list[Sequence], Tensor]]) -> None:
        """What a step sampled, piece by piece: the sequences and their ids [R]. The step before is forgotten.

        The id of a row with NaN means nothing; it is brought into the vocabulary, since the next step looks it up.
        """
        self._index, first = {}, 0
        for sequences, ids in pieces:
            end = first + len(sequences)
            torch.clamp(ids, 0, self._largest, out=self.ids[first:end])
            self._index.update(zip(map(id, sequences), range(first, end), strict=True))
            first = end
