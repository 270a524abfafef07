"""Matrices that a format keeps in one tensor, as tensors of their own; and the other way, several put on top of each
other. Rows are moved, never changed, and each goes to exactly one place.

Knows nothing of formats: which rows belong to whom is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def stacked_rows(*counts: int) -> tuple[Rows, ...]:
    """Rows of matrices that lie on top of each other, of as many rows each."""
    ends = np.cumsum(counts)
    return tuple(np.arange(end - count, end, dtype=np.intp) for end, count in zip(ends, counts, strict=True))


def cut(whole: SourceTensor, rows: Mapping[str, Rows], how: str) -> dict[str, SourceTensor]:
    """target -> its rows of `whole`. Raises ConvertError unless every row of it goes to one target."""
    taken = np.sort(np.concatenate(list(rows.values())))
    if not np.array_equal(taken, np.arange(whole.shape[0])):
        text = f"tensor {whole.name!r} has {whole.shape[0]} rows, the config needs {len(taken)}"
        raise ConvertError(text, whole.path, whole.offset)
    return {target: _rows_of(whole, some, how) for target, some in rows.items()}


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
