"""Numbers of fewer bits than numpy has: fp8, and small integers packed into 32-bit words.

Knows nothing of files or of which number scales which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Float32

WORD_BITS = 32
PIECE = 256
Integers = NDArray[Any]


def unpack(words: Integers, bits: int) -> NDArray[np.uint8]:
    """[..., n] words -> [..., n * 32 / bits] values from 0 up, the lowest bits first. bits: 1, 2, 4 or 8."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


def unpack_rows(words: Integers, bits: int, columns: int) -> Float32:
    """[rows, n] words -> fp32 [rows, columns], some rows at a time."""
    out = np.empty((words.shape[0], columns), np.float32)
    for start in range(0, len(out), PIECE):
        out[start : start + PIECE] = unpack(words[start : start + PIECE], bits)[:, :columns]
    return out


def _float8(exponent_bits: int, bias: int, has_infinity: bool) -> Float32:
    """The value of each of the 256 codes: sign, exponent, fraction."""
    codes = np.arange(256)
    fraction_bits = 7 - exponent_bits
    exponent, fraction = (codes >> fraction_bits) & ((1 << exponent_bits) - 1), codes & ((1 << fraction_bits) - 1)
    normal = np.ldexp(1.0 + fraction / (1 << fraction_bits), exponent - bias)
    subnormal = np.ldexp(fraction / (1 << fraction_bits), 1 - bias)
    values = np.where(exponent == 0, subnormal, normal)
    if has_infinity:
        values = np.where(exponent == (1 << exponent_bits) - 1, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


FLOAT8: dict[str, Float32] = {"F8_E4M3": _float8(4, 7, False), "F8_E5M2": _float8(5, 15, True)}
"""Code -> value, fp32 [256]."""
EXPONENTS: Float32 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
"""F8_E8M0, a scale that is a power of two: code -> value."""
