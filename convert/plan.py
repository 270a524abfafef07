"""What will be written: every tensor of the result, its shape, its sources and what is done to them.

Knows nothing of files on the way in or out. Planning reads no data, so that every refusal comes before the first byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.dtypes import NUMPY, Array, all_finite, cast
from convert.errors import ConvertError
from convert.rope_pairing import to_split_half
from convert.served_model import served_model
from convert.source import Source, SourceTensor
from model.config import ModelConfig
from model.tensor_shapes import Shape, tensor_shapes


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the result. read gives exactly the array to store, checked for NaN and inf."""

    name: str
    shape: Shape
    dtype: str
    source: SourceTensor
    transform: str
    read: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its data in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * NUMPY[self.dtype].itemsize


def make_plan(source: Source, dtype: str | None = None) -> list[Target]:
    """One target for every tensor the config needs. Raises ConvertError unless sources and needs match exactly."""
    config = source.values()
    model = served_model(config, source.path)
    if model.num_layers > len(source.table):
        raise ConvertError(f"num_hidden_layers is {model.num_layers}, with {len(source.table)} tensors", source.path)
    shapes = tensor_shapes(model)
    by_target = {target: source.table[name] for name, target in source.names.items()} | dict(source.derived)
    _account(source, model, shapes, by_target)
    return [_target(source, config, name, shape, by_target[name], dtype) for name, shape in shapes.items()]


def _account(source: Source, config: ModelConfig, shapes: dict[str, Shape], by_target: dict[str, SourceTensor]) -> None:
    """Every source tensor is used or dropped for a reason; every needed tensor is there in the right shape."""
    taken = {part for target, tensor in source.derived.items() if target in shapes for part in tensor.parts}
    for name, tensor in source.table.items():
        used = source.names.get(name) in shapes or name in taken
        if not used and name not in source.dropped:
            text = f"tensor {name!r} is not part of a {source.architecture} model of {config.num_layers} layers"
            raise ConvertError(text, tensor.path, tensor.offset)
    for name, shape in shapes.items():
        if name not in by_target:
            raise ConvertError(f"no tensor for {name}, which the config needs", source.path)
        tensor = by_target[name]
        if tensor.shape != shape:
            raise ConvertError(
                f"tensor {tensor.name!r} has shape {tensor.shape}, the config needs {shape}", tensor.path, tensor.offset
            )
        if tensor.dtype not in NUMPY:
            raise ConvertError(f"tensor {tensor.name!r} is {tensor.stored}: not supported", tensor.path, tensor.offset)


def _target(
    source: Source, config: Mapping[str, Any], name: str, shape: Shape, tensor: SourceTensor, dtype: str | None
) -> Target:
    target_dtype = dtype or tensor.dtype
    heads = rope_heads(name, config) if source.pairing == "adjacent" else None

    def read() -> Array:
        array = tensor.read()
        if not all_finite(array, tensor.dtype):
            raise ConvertError(f"tensor {tensor.name!r} holds NaN or inf", tensor.path, tensor.offset)
        array = cast(array if heads is None else to_split_half(array, heads), tensor.dtype, target_dtype)
        if target_dtype != tensor.dtype and not all_finite(array, target_dtype):
            raise ConvertError(f"tensor {tensor.name!r} overflows {target_dtype}", tensor.path, tensor.offset)
        return array

    steps = [f"dequantise {tensor.stored}"] if tensor.stored != tensor.dtype else []
    steps += [tensor.how] if tensor.how else []
    steps += [] if heads is None else [f"adjacent to split-half, {heads} heads"]
    steps += [f"round to {target_dtype}"] if target_dtype != tensor.dtype else []
    return Target(name, shape, target_dtype, tensor, ", ".join(steps) or "as stored", read)


def rope_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of this tensor belong to, where RoPE turns them; None elsewhere."""
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    if ".k_proj." in name:
        return int(config["num_key_value_heads"])
    return 1 if ".q_norm." in name or ".k_norm." in name else None
