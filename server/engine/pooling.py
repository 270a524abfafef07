"""The mean of a prompt's states, gathered chunk by chunk.

Knows no tensors and no requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.float64]


class MeanState:
    """Rows are added one after the other in float64, whatever the chunks: the same prompt has the same mean."""

    def __init__(self) -> None:
        self._end = 0
        self._total: States = np.zeros(0)

    def add(self, start: int, states: States) -> None:
        """states [N, D] of tokens start ... A chunk that is run again counts once; 0 begins anew."""
        if start == 0:
            self._end, self._total = 0, np.zeros(states.shape[1])
        if start == self._end:
            self._total = np.add.reduce(np.concatenate([self._total[None], states]), axis=0)
            self._end += len(states)

    def value(self) -> States:
        """[D]"""
        return self._total / self._end
