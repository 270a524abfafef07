"""Which format a file or a folder is in: each reader is asked whether it recognises the content, never the file name.

Knows nothing of what any format holds.
"""

from __future__ import annotations

from pathlib import Path

from convert.canonical import is_huggingface
from convert.errors import ConvertError
from convert.formats.gguf_header import MAGIC
from convert.formats.gguf_model import open_gguf
from convert.formats.huggingface import open_huggingface
from convert.formats.huggingface_bin import is_huggingface_bin, open_huggingface_bin
from convert.formats.litgpt import is_litgpt, open_litgpt
from convert.formats.llama2c import bytes_of_version_0, is_llama2c, open_llama2c
from convert.formats.llama2c_torch import ZIP_MAGIC, open_llama2c_torch
from convert.formats.meta import is_meta, open_meta
from convert.source import Source

LONGEST_START = 28  # bytes that tell a format


def open_source(path: Path) -> Source:
    """Recognise `path` (a file or a folder) by its content. Raises ConvertError when no reader knows it."""
    check_there(path)
    if path.is_dir():
        if is_huggingface(path):
            return open_huggingface(path)
        if is_huggingface_bin(path):
            return open_huggingface_bin(path)
        if is_litgpt(path):
            return open_litgpt(path)
        if is_meta(path):
            return open_meta(path)
        raise ConvertError("no checkpoint in this folder (no config.json with weights, no params.json)", path)
    with path.open("rb") as file:
        start = file.read(LONGEST_START)
    if start[:4] == MAGIC:
        return open_gguf(path)
    if start[:4] == ZIP_MAGIC:
        return open_llama2c_torch(path)
    if is_llama2c(path):
        return open_llama2c(path)
    if not start:
        raise ConvertError("is empty", path)
    if (nbytes := bytes_of_version_0(start)) is not None:
        text = f"its numbers are those of a llama2.c file of {nbytes:,} bytes, it has {path.stat().st_size:,}"
        raise ConvertError(f"{text}: copy it again", path)
    raise ConvertError(f"not a checkpoint of a known format (starts with {start[:8]!r})", path, 0)


def check_there(path: Path) -> None:
    """ConvertError for what is not there, and for what can be read once only or never ends."""
    if not path.exists():
        hub = f" and no hub id: `ropeway serve {path}` takes those, `hf download {path} --local-dir DIR` fetches one"
        raise ConvertError(f"no such file or folder{hub if len(path.parts) == 2 else ''}", path)
    if not path.is_dir() and not path.is_file():
        raise ConvertError("neither a file nor a folder: a checkpoint is read more than once, save it first", path)
