"""GGUF's number formats: what a block is, and how to turn blocks into fp32.

Knows nothing of files. Q4_0, Q4_1 and Q8_0 are read here (in pieces that stay in the processor's cache); the rarer
types by the `gguf` package. Both give the same bits, which the tests check.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Array, Float32

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}

# type code -> name; name -> (values of a block, bytes of a block)
_TYPES: list[tuple[int, str, int, int]] = [
    (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
    (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
]  # fmt: skip
TYPE_NAMES = {code: name for code, name, _, _ in _TYPES}
BLOCKS = {name: (values, size) for _, name, values, size in _TYPES}
REFUSED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0",
    42: "Q2_0",
}  # fmt: skip
PIECE = 2048  # blocks dequantised at a time: 64 Ki values, 256 KiB of output

Bytes = NDArray[np.uint8]


def dequantize(blocks: Array, kind: str) -> Float32:
    """uint8 [blocks, bytes of a block] -> fp32 [blocks, values of a block]."""
    own = _OWN.get(kind)
    if own is None:
        from gguf import GGMLQuantizationType, quants

        return np.asarray(quants.dequantize(blocks, GGMLQuantizationType[kind]), np.float32)
    out = np.empty((blocks.shape[0], BLOCKS[kind][0]), np.float32)
    for start in range(0, blocks.shape[0], PIECE):
        own(blocks[start : start + PIECE].view(np.uint8), out[start : start + PIECE])
    return out


def _half(blocks: Bytes, at: int) -> Float32:
    """The fp16 at byte `at` of every block, as fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, out: Float32) -> None:
    """Low halves of 16 bytes are values 0 to 15, high halves values 16 to 31."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q4_0(blocks: Bytes, out: Float32) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Float32) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Float32) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


_OWN: dict[str, Callable[[Bytes, Float32], None]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
