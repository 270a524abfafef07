"""Tiny sound checkpoints of every format, each with the file to damage and the places where its structures begin.

Knows nothing of what the converter should say about the damage.
"""

from __future__ import annotations

import base64
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file

from convert.tokenizer.pre_tokenizers import LLAMA3
from tests.conftest import BASE_CONFIG, random_tensors
from tests.convert_fused_sources import write_internlm2, write_litgpt
from tests.convert_sources import meta_params, meta_tensors, write_gguf, write_llama2c, write_llama2c_torch

CONFIG = BASE_CONFIG | {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40, "max_position_embeddings": 8,
}  # fmt: skip
PROSE = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


@dataclass(frozen=True)
class Sound:
    """A checkpoint at `source`; damage goes into `file`, at one of `boundaries` or anywhere before `header_end`."""

    source: Path
    file: Path
    boundaries: tuple[int, ...]
    header_end: int


def gguf(folder: Path) -> Sound:
    tokens = [f"<{i}>" for i in range(37)] + ["<unk>", "<s>", "</s>"]
    extra = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.5] * 40,
        "tokenizer.ggml.token_type": [1] * 37 + [2, 3, 3], "tokenizer.ggml.bos_token_id": 38,
        "tokenizer.ggml.eos_token_id": 39,
    }  # fmt: skip
    path = write_gguf(folder / "model.gguf", CONFIG, random_tensors(CONFIG), extra=extra)
    raw = path.read_bytes()
    names = [match.start() for match in re.finditer(rb"(llama|tokenizer|blk|token_embd|output)\.", raw)]
    end = max(names) + 60
    places = {0, 4, 8, 16, 24, end, len(raw) - 1} | {at + step for at in names for step in (-8, -4, 0, 12, 24, 32)}
    return Sound(path, path, tuple(sorted(places)), end)


def safetensors(folder: Path) -> Sound:
    path = folder / "consolidated.safetensors"
    save_file(meta_tensors(CONFIG, random_tensors(CONFIG)), path)
    (folder / "params.json").write_text(json.dumps(meta_params(CONFIG)))
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    starts = [end + row["data_offsets"][0] for row in json.loads(raw[8:end]).values()]
    return Sound(folder, path, (*range(10), *punctuation(raw[:end]), *starts, len(raw) - 1), end)


def punctuation(raw: bytes) -> list[int]:
    """Where JSON begins or ends something."""
    return [at for at, byte in enumerate(raw) if byte in b'{}[]":,']


def params_json(folder: Path) -> Sound:
    made = safetensors(folder)
    path = folder / "params.json"
    params = meta_params(CONFIG) | {"yarn": {"factor": 2.0, "original_max_position_embeddings": 4, "beta": 32}}
    path.write_text(json.dumps(params | {"max_seq_len": 8, "use_scaled_rope": False, "head_dim": 4, "hidden_dim": 16}))
    raw = path.read_bytes()
    return Sound(made.source, path, tuple(punctuation(raw)), len(raw))


def pth(folder: Path) -> Sound:
    path = folder / "consolidated.00.pth"
    torch.save(meta_tensors(CONFIG, random_tensors(CONFIG)), path)
    (folder / "params.json").write_text(json.dumps(meta_params(CONFIG)))
    return Sound(folder, path, tuple(zip_places(path)), path.stat().st_size)


def zip_places(path: Path) -> Iterator[int]:
    """Local headers, central directory, end records, and every tenth opcode of the pickle."""
    raw = path.read_bytes()
    yield from (match.start() + step for match in re.finditer(rb"PK[\x01\x03\x05\x06\x07]", raw) for step in (0, 1, 26))
    with zipfile.ZipFile(path) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    start = raw.index(data)
    places = [start + at for _, _, at in pickletools.genops(io.BytesIO(data)) if at is not None]
    yield from places[::10]


def pickle_inside(folder: Path) -> Sound:
    """The same, with the damage within the pickle: a checksum would hide it from a reader that looked at it."""
    made = pth(folder)
    raw = made.file.read_bytes()
    start, end = raw.index(b"\x80\x02}"), raw.index(b"PK\x07\x08", raw.index(b"\x80\x02}"))
    return Sound(made.source, made.file, (start, end - 1), end)


def config_json(folder: Path) -> Sound:
    torch.save(random_tensors(CONFIG), folder / "pytorch_model.bin")
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    raw = path.read_bytes()
    return Sound(folder, path, tuple(punctuation(raw)), len(raw))


def index_json(folder: Path) -> Sound:
    tensors = random_tensors(CONFIG)
    names = sorted(tensors)
    placed = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(placed.values()):
        torch.save({name: tensors[name] for name in names if placed[name] == file}, folder / file)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": placed}))
    raw = path.read_bytes()
    return Sound(folder, path, tuple(punctuation(raw)), len(raw))


def llama2c(version: int) -> Callable[[Path], Sound]:
    def make(folder: Path) -> Sound:
        path = write_llama2c(folder / "model.bin", CONFIG, random_tensors(CONFIG), version)
        size = path.stat().st_size
        return Sound(path, path, (*range(0, 48, 2), 255, 256, 257, *range(300, size, size // 40)), 44)

    return make


def llama2c_torch(folder: Path) -> Sound:
    path = write_llama2c_torch(folder / "ckpt.pt", CONFIG, random_tensors(CONFIG))
    return Sound(path, path, tuple(zip_places(path)), path.stat().st_size)


def litgpt_yaml(folder: Path) -> Sound:
    path = write_litgpt(folder / "lit", CONFIG, random_tensors(CONFIG)) / "model_config.yaml"
    raw = path.read_bytes()
    return Sound(path.parent, path, tuple(at for at, byte in enumerate(raw) if byte in b":\n"), len(raw))


def internlm2_config(folder: Path) -> Sound:
    path = write_internlm2(folder / "intern", CONFIG, random_tensors(CONFIG)) / "config.json"
    raw = path.read_bytes()
    return Sound(path.parent, path, tuple(punctuation(raw)), len(raw))


def with_tokenizer(name: str, raw: bytes, boundaries: list[int]) -> Callable[[Path], Sound]:
    def make(folder: Path) -> Sound:
        save_file(meta_tensors(CONFIG, random_tensors(CONFIG)), folder / "consolidated.safetensors")
        (folder / "params.json").write_text(json.dumps(meta_params(CONFIG)))
        (folder / name).write_bytes(raw)
        return Sound(folder, folder / name, tuple(boundaries), min(len(raw), 2000))

    return make


def sentencepiece_model(kind: str, normaliser: str, step: int) -> Callable[[Path], Sound]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE), model_writer=model, vocab_size=40, model_type=kind, minloglevel=2,
        hard_vocab_limit=False, normalization_rule_name=normaliser,
    )  # fmt: skip
    raw = model.getvalue()
    return with_tokenizer("tokenizer.model", raw, list(range(0, len(raw), step)))


def tekken_json() -> dict[str, Any]:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i + 60])).decode()} for i in range(30)]
    config = {"pattern": LLAMA3, "default_vocab_size": 40, "default_num_special_tokens": 10, "num_vocab_tokens": 30}
    return {"config": config, "vocab": vocab, "special_tokens": [{"rank": 0, "token_str": "<unk>"}]}


def tekken() -> Callable[[Path], Sound]:
    raw = json.dumps(tekken_json()).encode()
    return with_tokenizer("tekken.json", raw, punctuation(raw))


def tiktoken() -> Callable[[Path], Sound]:
    raw = b"".join(base64.b64encode(bytes([i + 60])) + b" %d\n" % i for i in range(30))
    return with_tokenizer("tokenizer.model", raw, list(range(len(raw))))


READERS: dict[str, Callable[[], Callable[[Path], Sound]]] = {
    "gguf": lambda: gguf, "safetensors": lambda: safetensors, "params.json": lambda: params_json, "pth": lambda: pth,
    "pickle": lambda: pickle_inside, "config.json": lambda: config_json, "index.json": lambda: index_json,
    "llama2c v0": lambda: llama2c(0), "llama2c v1": lambda: llama2c(1), "llama2c v2": lambda: llama2c(2),
    "sentencepiece bpe": lambda: sentencepiece_model("bpe", "identity", 7),
    "sentencepiece unigram": lambda: sentencepiece_model("unigram", "nmt_nfkc", 4001),
    "tekken": tekken, "tiktoken": tiktoken, "llama2c pt": lambda: llama2c_torch, "litgpt": lambda: litgpt_yaml,
    "internlm2": lambda: internlm2_config,
}  # fmt: skip


@contextmanager
def damaged(path: Path, raw: bytes) -> Iterator[None]:
    """`path` holds `raw` meanwhile."""
    whole = path.read_bytes()
    path.write_bytes(raw)
    try:
        yield
    finally:
        path.write_bytes(whole)
