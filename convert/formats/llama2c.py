"""llama2.c checkpoints: version 0 (no magic, recognised by its exact length), 1 (fp32) and 2 (int8 groups).

Knows nothing of the names elsewhere: tensors get Meta's names, as the exporter that wrote them has. RoPE base and norm
epsilon are not in the file; the program that runs it fixes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.dtypes import Array
from convert.errors import ConvertError
from convert.formats.meta_names import hugging_face_names
from convert.formats.rope_entries import rope_entries
from convert.source import ConfigEntry, Extent, Source, SourceTensor, file_tensor
from convert.tokenizer.llama2c import tokenizer_files

MAGIC = 0x616B3432  # "ak42"
V1_HEADER = 256
THETA, EPS = 10000.0, 1e-5
MAX_VALUE = 1 << 24  # of any header field: keeps the arithmetic below within reason

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """version, where the data starts, and the seven numbers. tied: no separate output matrix."""

    version: int
    start: int
    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool
    group_size: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def per_layer(self) -> dict[str, Shape]:
        kv = self.kv_heads * self.head_dim
        return {
            "attention_norm": (self.dim,), "attention.wq": (self.dim, self.dim), "attention.wk": (kv, self.dim),
            "attention.wv": (kv, self.dim), "attention.wo": (self.dim, self.dim), "ffn_norm": (self.dim,),
            "feed_forward.w1": (self.hidden_dim, self.dim), "feed_forward.w2": (self.dim, self.hidden_dim),
            "feed_forward.w3": (self.hidden_dim, self.dim),
        }  # fmt: skip

    def order(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes in the order of the file."""
        blocks, embedding = self.per_layer(), ("tok_embeddings.weight", (self.vocab_size, self.dim))
        norms, final = ["attention_norm", "ffn_norm"], ("norm.weight", (self.dim,))
        if self.version == 0:
            yield embedding
            yield from self._layers(list(blocks))
            yield final
            yield from ((name, (self.seq_len, self.head_dim // 2)) for name in ("freqs_cos", "freqs_sin"))
        else:
            yield from self._layers(norms)
            yield final
            yield embedding
            yield from self._layers([name for name in blocks if name not in norms])
        if not self.tied:
            yield "output.weight", (self.vocab_size, self.dim)

    def _layers(self, names: list[str]) -> Iterator[tuple[str, Shape]]:
        shapes = self.per_layer()
        return ((f"layers.{i}.{name}.weight", shapes[name]) for name in names for i in range(self.layers))


def read_header(path: Path) -> Header | None:
    """The header if `path` is a llama2.c file of the length that it describes, else None."""
    with path.open("rb") as file:
        raw = file.read(V1_HEADER)
    size = path.stat().st_size
    if len(raw) >= 8 and struct.unpack_from("<I", raw)[0] == MAGIC:
        return _versioned(path, raw, size)
    header = _version_0(raw)
    return header if header is not None and _length(header) == size else None


def _version_0(raw: bytes) -> Header | None:
    """Seven numbers that could be a model's."""
    if len(raw) < 28:
        return None
    dim, hidden, layers, heads, kv, vocab, seq = struct.unpack_from("<7i", raw)
    header = Header(0, 28, dim, hidden, layers, heads, kv, abs(vocab), seq, tied=vocab > 0)
    return header if _sound(header) else None


def bytes_of_version_0(raw: bytes) -> int | None:
    """How long a file that starts with `raw` would be as llama2.c's version 0, if it can be one."""
    header = _version_0(raw)
    return None if header is None else _length(header)


def _versioned(path: Path, raw: bytes, size: int) -> Header:
    version = struct.unpack_from("<i", raw, 4)[0]
    if version not in (1, 2) or len(raw) < V1_HEADER:
        raise ConvertError(f"llama2.c version {version} is not supported, or the header is cut", path, 4)
    dim, hidden, layers, heads, kv, vocab, seq = struct.unpack_from("<7i", raw, 8)
    group = struct.unpack_from("<i", raw, 37)[0] if version == 2 else 0
    header = Header(version, V1_HEADER, dim, hidden, layers, heads, kv, vocab, seq, raw[36] == 1, group)
    if not _sound(header):
        raise ConvertError(f"llama2.c header makes no sense: {header}", path, 8)
    if _length(header) != size:
        raise ConvertError(f"holds {size} bytes, its header describes {_length(header)} (truncated?)", path, size)
    return header


def _sound(header: Header) -> bool:
    numbers = (header.dim, header.hidden_dim, header.layers, header.heads, header.kv_heads, header.vocab_size)
    if not all(0 < number < MAX_VALUE for number in (*numbers, header.seq_len)) or header.layers > 10_000:
        return False
    if header.dim % header.heads or header.heads % header.kv_heads or header.head_dim % 2:
        return False
    if header.version != 2:
        return True
    return header.group_size > 0 and all(math.prod(shape) % header.group_size == 0 for _, shape in header.order())


def _length(header: Header) -> int:
    return header.start + sum(_nbytes(header, shape) for _, shape in header.order())


def _nbytes(header: Header, shape: Shape) -> int:
    """fp32, or for matrices of version 2 one byte a value and one fp32 scale a group."""
    count = math.prod(shape)
    return count + 4 * count // header.group_size if header.version == 2 and len(shape) == 2 else 4 * count


def is_llama2c(path: Path) -> bool:
    """Version 1 and 2 by magic, version 0 by the one length that its seven numbers allow."""
    return read_header(path) is not None


def open_llama2c(path: Path) -> Source:
    """Raises ConvertError for damage, and when stored RoPE tables disagree with the base that the format implies."""
    header = read_header(path)
    assert header is not None
    table, at = {}, header.start
    for name, shape in header.order():
        quantised = header.version == 2 and len(shape) == 2
        make = _quantised if quantised else _plain
        table[name] = make(header, name, path, shape, at)
        at += _nbytes(header, shape)
    dropped = {}
    if header.version == 0:
        _check_tables(header, table)
        reason = f"RoPE table, equals the one of base {THETA:g}"
        dropped = {"freqs_cos": reason, "freqs_sin": reason}
    return Source(
        path=path, format=f"llama2c-v{header.version}", architecture="llama", pairing="adjacent",
        config=_config(header), names=hugging_face_names(table), table=table, dropped=dropped,
        raw={"dim": header.dim, "n_layers": header.layers, "n_heads": header.heads, "n_kv_heads": header.kv_heads,
             "norm_eps": EPS, "rope_theta": THETA},
        tokenizer_files=lambda: tokenizer_files(path, header.vocab_size),
    )  # fmt: skip


def _plain(header: Header, name: str, path: Path, shape: Shape, offset: int) -> SourceTensor:
    return file_tensor(name, path, "F32", shape, offset, _nbytes(header, shape))


def _quantised(header: Header, name: str, path: Path, shape: Shape, offset: int) -> SourceTensor:
    """int8 values, then one fp32 scale for every group_size of them (groups run over the flattened tensor)."""
    count, group = math.prod(shape), header.group_size

    def read() -> Array:
        values = np.memmap(path, np.int8, "r", offset, (count,)).reshape(-1, group)
        scales = np.frombuffer(np.memmap(path, np.uint8, "r", offset + count, (4 * count // group,)), "<f4")
        return np.asarray(values.astype(np.float32) * scales[:, None], np.float32).reshape(shape)

    extents = (Extent(path, offset, _nbytes(header, shape)),)
    return SourceTensor(name, shape, f"Q8 groups of {group}", "F32", path, offset, read, extents=extents)


def _check_tables(header: Header, table: dict[str, SourceTensor]) -> None:
    width = header.head_dim
    frequencies = THETA ** (-np.arange(0, width, 2) / width)
    cos, sin = table["freqs_cos"].read(), table["freqs_sin"].read()
    for start in range(0, header.seq_len, 1024):
        angles = np.arange(start, min(start + 1024, header.seq_len))[:, None] * frequencies[None, :]
        rows = slice(start, start + len(angles))
        for name, found, want in (("freqs_cos", cos, np.cos(angles)), ("freqs_sin", sin, np.sin(angles))):
            if np.allclose(np.asarray(found[rows], np.float64), want, atol=1e-3):
                continue
            text = f"{name} does not belong to RoPE base {THETA:g}, which llama2.c implies"
            raise ConvertError(text, table[name].path, table[name].offset)


def _config(header: Header) -> dict[str, ConfigEntry]:
    implied = "implied by llama2.c"
    config = {
        "architectures": ConfigEntry(["LlamaForCausalLM"], implied),
        "model_type": ConfigEntry("llama", implied),
        "hidden_size": ConfigEntry(header.dim, "dim"),
        "intermediate_size": ConfigEntry(header.hidden_dim, "hidden_dim"),
        "num_hidden_layers": ConfigEntry(header.layers, "n_layers"),
        "num_attention_heads": ConfigEntry(header.heads, "n_heads"),
        "num_key_value_heads": ConfigEntry(header.kv_heads, "n_kv_heads"),
        "head_dim": ConfigEntry(header.head_dim, "dim / n_heads"),
        "vocab_size": ConfigEntry(header.vocab_size, "vocab_size"),
        "max_position_embeddings": ConfigEntry(header.seq_len, "seq_len"),
        "rms_norm_eps": ConfigEntry(EPS, implied),
        "hidden_act": ConfigEntry("silu", implied),
        **rope_entries(ConfigEntry(THETA, implied), None, ""),
        "tie_word_embeddings": ConfigEntry(
            header.tied, "sign of vocab_size" if header.version == 0 else "shared_classifier"
        ),
        "attention_bias": ConfigEntry(False, implied),
        "mlp_bias": ConfigEntry(False, implied),
        "bos_token_id": ConfigEntry(1, implied),
        "eos_token_id": ConfigEntry(2, implied),
    }
    return config
