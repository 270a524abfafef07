"""Matrices that a format keeps in one tensor, as tensors of their own; and the other way, several put on top of each
other. Rows are moved, never changed, and each goes to exactly one place.

Knows nothing of formats or names: how rows are laid out is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.source import SourceTensor

Rows = NDArray[np.intp]


def grouped_rows(heads: int, kv_heads: int, head_dim: int) -> tuple[Rows, Rows, Rows]:
    """Rows of q, k and v where each key head follows the query heads that share it: q q .. k v, q q .. k v."""
    share = heads // kv_heads
    of_group = np.arange(kv_heads * (share + 2) * head_dim, dtype=np.intp).reshape(kv_heads, share + 2, head_dim)
    return of_group[:, :share].reshape(-1), of_group[:, share].reshape(-1), of_group[:, share + 1].reshape(-1)


def stacked_rows(q: int, k: int, v: int) -> tuple[Rows, Rows, Rows]:
    """Rows of q, k and v that lie on top of each other, of as many rows each."""
    rows = np.arange(q + k + v, dtype=np.intp)
    return rows[:q], rows[q : q + k], rows[q + k :]


def split_qkv(
    whole: SourceTensor, target: str, heads: int, kv_heads: int, head_dim: int, by_group: bool
) -> dict[str, SourceTensor]:
    """q, k and v of `whole` (weight or bias) under the names that `target` makes with {} for the letter.

    Raises ConvertError unless the heads take up all of its rows.
    """
    count = (heads + 2 * kv_heads) * head_dim
    if not whole.shape or whole.shape[0] != count or heads % kv_heads:
        text = f"tensor {whole.name!r} {whole.shape} does not hold {heads} + 2 * {kv_heads} heads of {head_dim} rows"
        raise ConvertError(text, whole.path, whole.offset)
    if by_group:
        rows = grouped_rows(heads, kv_heads, head_dim)
    else:
        rows = stacked_rows(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(count)), whole.name
    how = f"rows of one of q, k, v, {'by group' if by_group else 'on top of each other'}"
    return {target.format(letter): _rows_of(whole, some, how) for letter, some in zip("qkv", rows, strict=True)}


def _rows_of(whole: SourceTensor, rows: Rows, how: str) -> SourceTensor:
    def read() -> Array:
        return whole.read()[rows]

    return SourceTensor(
        whole.name, (len(rows), *whole.shape[1:]), whole.stored, whole.dtype, whole.path, whole.offset, read,
        (whole.name,), how,
    )  # fmt: skip


def stack(parts: Sequence[SourceTensor], how: str) -> SourceTensor:
    """All parts as one tensor, the first on top. Raises ConvertError unless they are of one type and width."""
    first = parts[0]
    for part in parts[1:]:
        if (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]):
            text = f"tensor {part.name!r} {part.dtype} {part.shape} does not go with {first.name!r} {first.dtype}"
            raise ConvertError(f"{text} {first.shape}", part.path, part.offset)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return SourceTensor(
        " + ".join(part.name for part in parts), shape, first.stored, first.dtype, first.path, first.offset,
        lambda: np.concatenate([part.read() for part in parts]),
        tuple(dict.fromkeys(name for part in parts for name in part.parts or (part.name,))), how,
    )  # fmt: skip
