"""From MODEL to a config and a table of tensors: a folder, a config.json alone, a file that the converter reads, or the
demo model.

Knows nothing of costs. Reads headers only, and never the network.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from convert.canonical import is_huggingface, needs_conversion
from convert.demo import demo_model_file
from convert.errors import ConvertError
from convert.formats.gguf_header import MAGIC
from model.config import ConfigError, ModelConfig, load_config
from server.plan.headers import FLOATS, StoredTensor, from_safetensors, refusal
from server.plan.shapes import tensors_of

WEIGHTS = ("*.safetensors", "*.bin", "*.pth")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as its headers describe it.

    origin says where the tensor sizes come from. serve_as: the MODEL of `ropeway serve`, None without weights. warning:
    why it would refuse what the headers promise.
    """

    name: str
    config: ModelConfig
    tensors: tuple[StoredTensor, ...]
    origin: str
    serve_as: str | None = None
    warning: str | None = None


def open_model(model: str | None) -> PlannedModel:
    """Raises ConvertError or ConfigError: what is wrong with which file, and what to do."""
    path = Path(model) if model else demo_model_file()
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise ConvertError("no such folder or file (plan reads no network: give a config.json that you have)", path)
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC and path.suffix == ".json":
        config = _read_config(path)
        return PlannedModel(
            path.parent.resolve().name, config, tensors_of(config), "the shapes that config.json implies"
        )
    return _open_convertible(path, model or "")


def _open_folder(folder: Path) -> PlannedModel:
    if is_huggingface(folder) and needs_conversion(folder):
        return _open_convertible(folder, str(folder))
    try:
        config = load_config(folder)
    except ConfigError:
        if (folder / "config.json").is_file() and not any(weights for kind in WEIGHTS for weights in folder.glob(kind)):
            raise
        return _open_convertible(folder, str(folder))
    tensors = from_safetensors(folder)
    if tensors is None:
        return PlannedModel(folder.resolve().name, config, tensors_of(config), "the shapes that config.json implies")
    origin, warning = "the headers of its safetensors", refusal(folder, config)
    return PlannedModel(folder.resolve().name, config, tensors, origin, str(folder), warning)


def _open_convertible(path: Path, serve_as: str) -> PlannedModel:
    """What the converter would write, from the headers it would read; its readers are imported for nothing else."""
    from convert.detect import open_source
    from convert.plan import make_plan

    source = open_source(path)
    targets = make_plan(source)
    tensors = tuple(StoredTensor(t.name, t.shape, FLOATS.get(t.dtype), t.nbytes) for t in targets)
    dtype = Counter(tensor.dtype for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]
    config = ModelConfig.from_dict(source.values() | {"dtype": dtype, "torch_dtype": dtype})
    origin = f"the headers of a checkpoint of {source.format}, as the converter writes it"
    return PlannedModel(path.stem, config, tensors, origin, serve_as)


def _read_config(path: Path) -> ModelConfig:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConvertError(f"not JSON: {error}", path) from None
    if not isinstance(raw, dict):
        raise ConvertError("not a JSON object", path)
    if "model_type" not in raw:
        raise ConvertError("no model_type in it: not the config.json of a model", path)
    try:
        return ModelConfig.from_dict(raw)
    except ConfigError as error:
        raise ConvertError(str(error), path) from None
