"""The index of a checkpoint in several files: which file holds which tensor, and whether each is where it should be.

Knows nothing of what is in the files; imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from model.safetensors_header import WeightsError, once

T = TypeVar("T")


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name; every file lies beside the index. Raises WeightsError."""
    try:
        placed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)["weight_map"]
        pairs = [(str(name), file) for name, file in placed.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path.name} is not an index of files (no weight_map): {error!r}"[:200]) from None
    for name, file in pairs:
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise WeightsError(f"{path.name} places tensor {name} outside the folder: {str(file)[:80]!r}")
    files = sorted({file for _, file in pairs})
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing or not files:
        what = f"copy {missing[0]} again" if missing else "it names none"
        raise WeightsError(f"{path.name}: {len(missing)} of {len(files)} files are missing: {what}")
    return dict(pairs)


def read_shards(index: Path, read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """The tensors of every file, as `read` gives them; each must be in the file that the index says, and only there.

    Raises WeightsError.
    """
    placed = read_index(index)
    found: dict[str, T] = {}
    for file in sorted(set(placed.values())):
        for name, tensor in read(index.parent / file).items():
            if placed.get(name) != file:
                where = placed.get(name, "no file at all")
                raise WeightsError(f"{file} holds tensor {name}, which {index.name} places in {where}")
            found[name] = tensor
    for name, file in placed.items():
        if name not in found:
            raise WeightsError(f"{index.name} places tensor {name} in {file}, which does not hold it")
    return found
