"""The tensors of a Hugging Face folder, read one at a time, every file checked before the first is read.

Knows no model: names, shapes and bytes. A file shorter than its header promises is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.folder_headers import INVERSE_FREQUENCIES, check_shape, read_folder
from model.safetensors_header import Entry, WeightsError


@dataclass(slots=True)
class Checkpoint:
    """entries: every tensor of the folder. Each must be taken once before finish() is satisfied."""

    folder: Path
    entries: dict[str, Entry]
    taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and check the headers of all files. Raises WeightsError."""
        return cls(folder, read_folder(folder))

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A copy of one tensor, converted. Raises WeightsError if it is missing, misshapen or not finite."""
        entry = self.entries.get(name)
        if entry is None:
            raise WeightsError(f"{self.folder} lacks tensor {name} {list(shape)}")
        check_shape(name, entry, shape)
        where = f"{entry.path.name}: tensor {name}"
        try:
            with safe_open(entry.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name).to(dtype=dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{where} cannot be read: {error}") from None
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():  # NaN goes along; 40 times as fast as on the whole
            raise WeightsError(f"{where} holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
        self.taken.add(name)
        return tensor.to(device)

    def finish(self) -> None:
        """Raise WeightsError if a tensor was not used: a checkpoint with more in it is another model."""
        left = [name for name in self.entries if name not in self.taken and not name.endswith(INVERSE_FREQUENCIES)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            files = ", ".join(sorted({self.entries[name].path.name for name in left}))
            raise WeightsError(f"{files}: the model has no use for tensor {', '.join(left[:3])}{more}")
