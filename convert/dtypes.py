"""Numbers as safetensors names them (F32, F16, BF16), held in numpy: BF16 travels as its upper 16 bits in uint16.

Knows nothing of tensors' meaning or of quantised blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Float32 = NDArray[np.float32]

NUMPY: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
}  # fmt: skip
PIECE = 1 << 18
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_float32(array: Array, dtype: str) -> Float32:
    """The same values in fp32 (exact for F16 and BF16)."""
    if dtype == "BF16":
        bits = array.astype(np.uint32)
        bits <<= 16  # in place: a third copy of the largest tensor would show
        return bits.view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float32(array: Float32, dtype: str) -> Array:
    """Round to nearest, ties to even. A finite value that F16 cannot hold becomes inf: the caller checks."""
    if dtype == "BF16":
        out = np.empty(array.shape, np.uint16)
        for rounded, values in zip(_pieces(out), _pieces(array), strict=True):
            bits = values.view(np.uint32)
            rounded[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return out
    with np.errstate(over="ignore"):
        return array.astype(NUMPY[dtype], copy=False)


def cast(array: Array, dtype: str, target: str) -> Array:
    """Bits untouched when the type stays, else by way of fp32."""
    return array if dtype == target else from_float32(to_float32(array, dtype), target)


def all_finite(array: Array, dtype: str) -> bool:
    """False if a NaN or an infinity is among the values."""
    if dtype == "BF16":
        return all(bool(((piece.view(np.uint16) & 0x7F80) != 0x7F80).all()) for piece in _pieces(array))
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(array, axis=None, dtype=np.float32 if dtype == "F16" else None)
    return bool(np.isfinite(total) or np.isfinite(array).all())


def _pieces(array: NDArray[Any]) -> list[NDArray[Any]]:
    """The values in order, in pieces that stay in the processor's cache."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return [flat[start : start + PIECE] for start in range(0, flat.size, PIECE)]


def raw_bytes(array: Array) -> memoryview:
    """The values as they lie in a safetensors file: row-major, little-endian. A copy only where it must be."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def shortest_float(value: float) -> float:
    """The shortest decimal that reads back as the same fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
