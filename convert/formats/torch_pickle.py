"""PyTorch's zip checkpoints read without running anything: an unpickler that knows six names and refuses the rest.

Knows nothing of what the tensors are for, and does not import torch. Tensors stay in the file until they are read.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import NUMPY, Array
from convert.errors import ConvertError
from convert.source import Extent, SourceTensor

STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip
ITEM_BYTES = {"I64": 8, "I32": 4, "U8": 1, "BOOL": 1} | {name: dtype.itemsize for name, dtype in NUMPY.items()}
MAX_PICKLE = 64 << 20
LOCAL_HEADER = 30
DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, RuntimeError, EOFError, KeyError, OSError)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a storage lies in the file."""

    dtype: str
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A view of a storage: offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Elements of the storage from its first to its last."""
        steps = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return 1 + steps if math.prod(self.shape) else 0


def read_torch(path: Path) -> dict[str, Any]:
    """The pickled dictionary, with a TorchTensor for every tensor. Raises ConvertError for anything else in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except DAMAGED as error:
        text = "not a sound zip archive: copy it again if it is truncated, save it anew if it is of torch before 1.6"
        raise ConvertError(f"{text} ({error})", path) from error


def state_tensors(path: Path, state: dict[str, Any]) -> dict[str, SourceTensor]:
    """The tensors of a flat state dict; any other value in it is refused."""
    table = {}
    for name, value in state.items():
        if not isinstance(value, TorchTensor):
            raise ConvertError(f"{name!r} is not a tensor", path)
        table[name] = _source_tensor(path, name, value)
    return table


def _read(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE or pickles[0].compress_type != zipfile.ZIP_STORED:
        raise ConvertError("expected one uncompressed data.pkl of at most 64 MiB", path)
    folder = pickles[0].filename.removesuffix("data.pkl")
    names = set(archive.namelist())
    if folder + "byteorder" in names and _start(archive, folder + "byteorder") != b"little":
        raise ConvertError("saved on a big-endian machine: not supported", path)
    data = archive.read(pickles[0])
    try:
        _check_memo(path, data)
        value = _Unpickler(path, archive, folder, data).load()
    except ConvertError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ConvertError(f"data.pkl is damaged: {type(error).__name__}: {error}", path) from error
    if not isinstance(value, dict):
        raise ConvertError(f"holds a {type(value).__name__}, expected a dictionary of tensors", path)
    return value


def _start(archive: zipfile.ZipFile, name: str) -> bytes:
    """The first bytes of an entry, however much it would unpack to."""
    with archive.open(name) as entry:
        return entry.read(16)


def _check_memo(path: Path, data: bytes) -> None:
    """A pickle numbers what it will refer to again; Python makes room for the highest number, whatever it is."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ConvertError(f"the pickle wants room for {argument} objects, it has {len(data)} bytes", path)


class _Unpickler(pickle.Unpickler):
    """Every name that a pickle may use is in `find_class`; none of them can run code."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, folder: str, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.path, self.folder = path, folder
        self.entries = {info.filename: info for info in archive.infolist()}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, requires_grad, hooks: tensor
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        raise ConvertError(f"the pickle asks for {module}.{name}: refused, it could run code", self.path)

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, count = pid
        entry = self.entries.get(f"{self.folder}data/{key}")
        if kind != "storage" or dtype not in ITEM_BYTES or not isinstance(count, int) or count < 0:
            raise ConvertError(f"storage {str(pid)[:60]} is not understood", self.path)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < count * ITEM_BYTES[dtype]:
            raise ConvertError(f"storage {key} is missing, compressed or shorter than {count} values", self.path)
        return Storage(dtype, self.data_offset(entry), count)

    def data_offset(self, entry: zipfile.ZipInfo) -> int:
        """Stored bytes follow the local header, whose name and extra field have their own lengths."""
        with self.path.open("rb") as file:
            file.seek(entry.header_offset)
            header = file.read(LOCAL_HEADER)
        if len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ConvertError("local header is damaged", self.path, entry.header_offset)
        name, extra = struct.unpack_from("<HH", header, 26)
        start = entry.header_offset + LOCAL_HEADER + int(name) + int(extra)
        if start + entry.file_size > self.path.stat().st_size:
            raise ConvertError(f"{entry.filename} runs past the end of the file", self.path, start)
        return start

    def rebuild_tensor(
        self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> TorchTensor:
        numbers = (offset, *shape, *strides)
        sound = isinstance(storage, Storage) and all(isinstance(number, int) and number >= 0 for number in numbers)
        if not sound or len(shape) != len(strides) or math.prod(shape) > storage.count:
            raise ConvertError(f"a tensor of shape {str(shape)[:60]} does not fit its storage", self.path)
        tensor = TorchTensor(storage, offset, tuple(shape), tuple(strides))
        if tensor.span and offset + tensor.span > storage.count:
            raise ConvertError(f"a tensor of shape {tensor.shape} runs past its storage", self.path, storage.offset)
        return tensor


def _source_tensor(path: Path, name: str, tensor: TorchTensor) -> SourceTensor:
    storage = tensor.storage
    start = storage.offset + tensor.offset * ITEM_BYTES[storage.dtype]

    def read() -> Array:
        if storage.dtype not in NUMPY:
            raise ConvertError(f"tensor {name!r} is {storage.dtype}, which is not supported", path, start)
        dtype = NUMPY[storage.dtype]
        flat = np.memmap(path, dtype, "r", storage.offset, (storage.count,))
        strides = [step * dtype.itemsize for step in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)

    extents = (Extent(path, start, tensor.span * ITEM_BYTES[storage.dtype]),)
    return SourceTensor(name, tensor.shape, storage.dtype, storage.dtype, path, start, read, extents=extents)
