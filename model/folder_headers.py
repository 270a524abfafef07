"""The tensors that a Hugging Face folder promises: the headers of all its files, and whether the files agree.

Knows no tensor library: who plans reads them as who loads does.
"""

from __future__ import annotations

from pathlib import Path

from model.config import ModelConfig
from model.safetensors_header import INDEX, ITEM_BYTES, Entry, WeightsError, check_size, read_header
from model.shard_index import read_shards
from model.tensor_shapes import HEAD, tensor_shapes

FLOATS = ("F64", "F32", "F16", "BF16")
INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"  # stored by some, computed from the config by all


def read_folder(folder: Path) -> dict[str, Entry]:
    """Every tensor by name; each file is as long as it says. Raises WeightsError."""
    if (folder / INDEX).exists():
        return read_shards(folder / INDEX, _checked)
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _checked(path).items():
            if name in entries:
                raise WeightsError(f"tensor {name} is both in {entries[name].path.name} and in {path.name}")
            entries[name] = entry
    if not entries:
        raise WeightsError(f"{folder} holds no *.safetensors file")
    return entries


def check_entries(entries: dict[str, Entry], config: ModelConfig) -> None:
    """Raise WeightsError unless the tensors are those of the config, as a loader finds out one by one."""
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in entries:
            raise WeightsError(f"no file holds tensor {name}, which config.json asks for")
        check_shape(name, entries[name], shape)
    for name, entry in entries.items():  # the head may be stored where the config ties it
        if name not in shapes and name != HEAD and not name.endswith(INVERSE_FREQUENCIES):
            raise WeightsError(f"{entry.path.name}: the model has no use for tensor {name}")


def check_shape(name: str, entry: Entry, shape: tuple[int, ...]) -> None:
    """Raise WeightsError unless the stored shape is this one, and the type one that is served."""
    where = f"{entry.path.name}: tensor {name}"
    if entry.shape != shape:
        raise WeightsError(f"{where} has shape {list(entry.shape)}, config.json asks for {list(shape)}")
    if entry.dtype not in FLOATS:
        raise WeightsError(f"{where} is {entry.dtype}, expected one of {', '.join(FLOATS)}")


def _checked(path: Path) -> dict[str, Entry]:
    """The tensors of one file, which is as long as it says and of types that can be read."""
    header = read_header(path)
    check_size(path, header)
    for name, entry in header.entries.items():
        if entry.dtype not in ITEM_BYTES:
            raise WeightsError(f"{path.name}: tensor {name} is {entry.dtype}, expected one of {', '.join(FLOATS)}")
    return header.entries
