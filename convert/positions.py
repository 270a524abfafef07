"""What the logits of a short text hide: how fast pairs turn and how far each layer sees, in source and result.

Knows nothing of how either side is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert.forward import Reading

SAME_ROTATION = 1e-3  # relative: scalings are stored in fp32, and llama3's is read back from a table of ratios


@dataclass(frozen=True, slots=True)
class RotationComparison:
    """How fast pairs turn in source and result, and the factor on cosines and sines."""

    pairs: int
    max_relative: float
    passed: bool

    def line(self) -> str:
        """The comparison in one line, for people."""
        verdict = "agree" if self.passed else "DISAGREE"
        return f"{verdict} over {self.pairs} pairs: max relative difference {self.max_relative:.1e}"


@dataclass(frozen=True, slots=True)
class WindowComparison:
    """Tokens that each layer sees. Where they differ: the first such layer, and what source and result have there."""

    layers: int
    windowed: int
    passed: bool
    at_layer: int | None = None
    source: int | None = None
    result: int | None = None

    def line(self) -> str:
        """The comparison in one line, for people."""
        if self.passed:
            return f"agree over {self.layers} layers, {self.windowed or 'none'} of them with a window"
        theirs, ours = (f"{window} tokens" if window else "no window" for window in (self.source, self.result))
        return f"DISAGREE in layer {self.at_layer}: {theirs} in the source, {ours} in the result"


def compare_rotation(original: Reading, result: Reading) -> RotationComparison:
    """The whole vectors of inverse frequencies, both of them where a model has two, and the factor on cos and sin."""
    theirs, ours = _rotation(original), _rotation(result)
    pairs = len(theirs) - 1
    if theirs.shape != ours.shape:
        return RotationComparison(pairs, math.inf, passed=False)
    worst = float(np.abs(ours / theirs - 1).max())
    return RotationComparison(pairs, worst, worst <= SAME_ROTATION)


def _rotation(reading: Reading) -> NDArray[np.float64]:
    dims = reading.dimensions
    far = dims.inverse_frequencies[:0] if dims.far_frequencies is None else dims.far_frequencies
    return np.concatenate([dims.inverse_frequencies, far, [dims.rope_scale]])


def compare_windows(original: Reading, result: Reading) -> WindowComparison:
    """Layer by layer."""
    theirs, ours = original.dimensions.windows, result.dimensions.windows
    windowed = sum(window is not None for window in theirs)
    for layer, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a != b:
            return WindowComparison(len(theirs), windowed, False, layer, a, b)
    return WindowComparison(len(theirs), windowed, True)
