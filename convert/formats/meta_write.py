"""Writes Meta's folder: params.json and one consolidated.00.pth that torch.load(weights_only=True) reads.

Knows nothing of other formats; tensors arrive with Meta's names and adjacent pairs. One tensor in memory at a time.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.dtypes import raw_bytes
from convert.errors import ConvertError
from convert.plan import Target
from convert.source import Source

ARCHIVE = "consolidated.00"
TOKENIZERS = ("tokenizer.model", "tokenizer.model.v*", "tekken.json")
DEFAULT_THETA = 10000.0
KEPT = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "vocab_size": "vocab_size", "rms_norm_eps": "norm_eps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        from torch._utils import _rebuild_tensor_v2

        strides: list[int] = []
        step = 1
        for dim in reversed(self.shape):
            strides.insert(0, step)
            step *= dim
        return _rebuild_tensor_v2, (self.storage, 0, self.shape, tuple(strides), False, OrderedDict())


class _Pickler(pickle.Pickler):
    """Storages become persistent ids, as torch.save writes them."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        import torch

        kinds = {"F32": torch.FloatStorage, "F16": torch.HalfStorage, "BF16": torch.BFloat16Storage}
        return "storage", kinds[value.dtype], value.key, "cpu", value.count


def write_meta(folder: Path, source: Source, targets: Sequence[Target]) -> None:
    """Raises ConvertError for what params.json cannot say: another rope scaling than Llama 3.1's, an odd head_dim.

    Only keys that Meta's own loader takes are written, so the context length is not.
    """
    params = _params(source)
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params) + "\n", "utf-8")
    state: dict[str, _Tensor] = OrderedDict()
    for index, target in enumerate(targets):
        count = 1
        for dim in target.shape:
            count *= dim
        state[target.name] = _Tensor(_Storage(str(index), target.dtype, count), target.shape)
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    with zipfile.ZipFile(folder / f"{ARCHIVE}.pth", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{ARCHIVE}/data.pkl", buffer.getvalue())
        archive.writestr(f"{ARCHIVE}/byteorder", "little")
        for index, target in enumerate(targets):
            with archive.open(f"{ARCHIVE}/data/{index}", "w", force_zip64=True) as entry:
                entry.write(raw_bytes(target.read()))
        archive.writestr(f"{ARCHIVE}/version", "3\n")


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy the tokenizer of a source folder if it is in one of the formats that go with params.json."""
    names = [name for pattern in TOKENIZERS for name in sorted(source.glob(pattern))] if source.is_dir() else []
    for name in names:
        shutil.copyfile(name, folder / name.name)
    return bool(names)


def _params(source: Source) -> dict[str, Any]:
    config: dict[str, Any] = source.values()
    if config["model_type"] != "llama":
        known = "llama models (and mistral in Mistral's own files)"
        raise ConvertError(f"Meta's files hold {known}, this one is {config['model_type']}: try --to gguf", source.path)
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ConvertError("params.json cannot hold a head_dim that is not dim / n_heads", source.path)
    if config["rope_parameters"].get("partial_rotary_factor", 1.0) != 1.0:
        text = "Meta's code turns whole heads, this model turns parts of them (partial_rotary_factor): keep --to hf"
        raise ConvertError(text, source.path)
    params = {name: config[key] for key, name in KEPT.items()} | _width(config)
    if config["rope_parameters"]["rope_theta"] != DEFAULT_THETA:
        params["rope_theta"] = config["rope_parameters"]["rope_theta"]
    scaling = config.get("rope_scaling")
    if scaling is None:
        return params
    small = (params["dim"], params["n_layers"]) in ((2048, 16), (3072, 28))
    standard = {
        "rope_type": "llama3", "factor": 32.0 if small else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    if scaling != standard:
        raise ConvertError(f"params.json cannot hold rope scaling {scaling}", source.path)
    return params | {"use_scaled_rope": True}


def _width(config: Mapping[str, Any]) -> dict[str, Any]:
    """Meta computes the MLP's width as m * ceil(int(f * int(8 dim / 3)) / m): with m the width itself, f at most 1."""
    width, usual = config["intermediate_size"], int(8 * config["hidden_size"] / 3)
    return {"multiple_of": width} | ({"ffn_dim_multiplier": width / usual} if usual > width else {})
