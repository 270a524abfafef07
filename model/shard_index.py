"""The index of a checkpoint in several files: which file holds which tensor, and whether each is where it should be.

Knows nothing of what is in the files; imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from model.safetensors_header import WeightsError, read_object

T = TypeVar("T")


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name; every file lies beside the index. Raises WeightsError."""
    try:
        placed = read_object(path.read_bytes()).get("weight_map")
    except ValueError as error:
        raise WeightsError(f"{path.name} is no index of files: {error}") from None
    if not isinstance(placed, dict):
        raise WeightsError(f"{path.name} is no index of files: no weight_map of tensors to files")
    for name, file in placed.items():
        if not isinstance(file, str):
            raise WeightsError(f"{path.name} gives tensor {name} {str(file)[:80]}, expected the name of a file")
        if not file or Path(file).name != file:
            raise WeightsError(f"{path.name} places tensor {name} outside the folder: {file[:80]!r}")
    pairs = placed.items()
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
