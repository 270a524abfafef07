"""fp8 and compressed-tensors: matrices of fp8 or int8 with scales, and signed integers packed into words.

Knows nothing of folders. What it cannot say exactly it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import Float32
from convert.errors import ConvertError
from convert.formats.packed_numbers import FLOAT8, unpack, unpack_rows
from convert.formats.quantised_scheme import (
    Parts,
    Scheme,
    check_groups,
    numbers,
    stored,
    tile_shape,
    tiled,
    whole_numbers,
)  # fmt: skip


class ScaledMatrix(Scheme):
    """A matrix as it is, in fp8 or int8, times a scale: one, one a row, one a row and group, or one a block."""

    values, dtypes = "weight", frozenset({"F8_E4M3", "F8_E5M2", "I8"})
    others = ("weight_scale", "weight_scale_inv", "weight_zero_point")

    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        weight = parts["weight"]
        scales = [parts[leaf] for leaf in ("weight_scale", "weight_scale_inv") if leaf in parts]
        if len(scales) != 1 or len(weight.shape) != 2:
            text = f"{name} is a quantised matrix of shape {weight.shape} with {len(scales)} scales, expected one"
            raise ConvertError(text, weight.path, weight.offset)
        rows, columns = weight.shape
        tile_shape(name, scales[0], (rows, columns), self.block())
        if (zero := parts.get("weight_zero_point")) is not None:
            self.fits(name, zero, scales[0].shape)
        return rows, columns

    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block, where the config says that there are blocks."""
        said = self.said.get("weight_block_size")
        if said is None:
            return None
        if not isinstance(said, list) or len(said) != 2 or not all(isinstance(n, int) and n > 0 for n in said):
            raise ConvertError(f"weight_block_size is {str(said)[:60]}, expected two sizes", self.path)
        return said[0], said[1]

    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        weight, scale = parts["weight"], parts.get("weight_scale") or parts["weight_scale_inv"]
        codes = stored(weight)
        out: Float32 = codes.astype(np.float32) if weight.dtype == "I8" else FLOAT8[weight.dtype][codes]
        tile = tile_shape(weight.name, scale, shape, self.block())
        if "weight_zero_point" in parts:
            tiled(out, whole_numbers(parts["weight_zero_point"]), tile, np.subtract)
        tiled(out, numbers(scale), tile, np.multiply)
        return out


class Fp8(ScaledMatrix):
    """Blocks (DeepSeek, Qwen) or one scale a matrix. `weight_scale_inv` multiplies, whatever its name says."""

    dtypes = frozenset(FLOAT8)


class CompressedTensors(ScaledMatrix):
    """int8 and fp8 matrices with scales. Packed integers are PackedIntegers."""

    FORMATS = ("float-quantized", "int-quantized", "naive-quantized", None)

    def block(self) -> tuple[int, int] | None:
        said = _only_group(self.path, self.said).get("block_structure")
        return (int(said[0]), int(said[1])) if isinstance(said, list) and len(said) == 2 else None


class PackedIntegers(Scheme):
    """compressed-tensors pack-quantized: signed integers, 2 ** (bits - 1) added, packed along a row's columns."""

    values, dtypes = "weight_packed", frozenset({"I32"})
    others = ("weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")

    def bits(self) -> int:
        """Bits of a value, which must divide a word."""
        weights = _only_group(self.path, self.said)
        if weights.get("num_bits") not in (2, 4, 8) or weights.get("type") != "int":
            text = f"{weights.get('num_bits')} bits of type {weights.get('type')} are not supported"
            raise ConvertError(f"compressed-tensors: {text}", self.path)
        return int(weights["num_bits"])

    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        self.need(name, parts, "weight_shape", "weight_scale")
        self.fits(name, parts["weight_shape"], (2,))
        rows, columns = (int(number) for number in stored(parts["weight_shape"]))
        per_word = 32 // self.bits()
        self.fits(name, parts["weight_packed"], (rows, -(-columns // per_word)))
        scale = parts["weight_scale"]
        tile_shape(name, scale, (rows, columns), None)
        if (zero := parts.get("weight_zero_point")) is not None:
            packed = (-(-rows // per_word), *scale.shape[1:])
            self.fits(name, zero, packed if zero.dtype == "I32" else scale.shape)
        if (order := parts.get("weight_g_idx")) is not None:
            self.fits(name, order, (columns,))
        return rows, columns

    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        bits, (rows, columns) = self.bits(), shape
        middle = 1 << (bits - 1)
        out = unpack_rows(stored(parts["weight_packed"]), bits, columns)
        out -= middle
        scale = numbers(parts["weight_scale"])
        zero = self.zero_points(parts, rows, bits)
        order = parts.get("weight_g_idx")
        if order is not None and (groups := stored(order)).min() >= 0:
            check_groups(order, groups, scale.shape[1])
            out -= 0 if zero is None else zero[:, groups]
            out *= scale[:, groups]
            return out
        tile = tile_shape("", parts["weight_scale"], shape, None)
        if zero is not None:
            tiled(out, zero, tile, np.subtract)
        tiled(out, scale, tile, np.multiply)
        return out

    def zero_points(self, parts: Parts, rows: int, bits: int) -> Float32 | None:
        """[rows, groups]; in newer files they are packed as well, along the rows."""
        tensor = parts.get("weight_zero_point")
        if tensor is None:
            return None
        if tensor.dtype != "I32":
            return whole_numbers(tensor)
        values = unpack(np.ascontiguousarray(stored(tensor).T), bits).T[:rows]
        return values.astype(np.float32) - (1 << (bits - 1))


def _only_group(path: Path, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights' settings of compressed-tensors, which must be the same for all linears."""
    groups = said.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    if len(found) != 1 or not isinstance(found[0], dict) or not isinstance(found[0].get("weights"), dict):
        raise ConvertError(f"compressed-tensors: {len(found)} config_groups, only one is supported", path)
    weights: Mapping[str, Any] = found[0]["weights"]
    return weights


def compressed_tensors(path: Path, said: Mapping[str, Any]) -> Scheme:
    for key in ("sparsity_config", "transform_config"):
        value = said.get(key)
        if value and value != {"format": "dense"}:
            raise ConvertError(f"compressed-tensors: {key} {str(value)[:60]} is not supported", path)
    _only_group(path, said)
    if said.get("format") == "pack-quantized":
        return PackedIntegers(path, said)
    if said.get("format") not in CompressedTensors.FORMATS:
        raise ConvertError(f"compressed-tensors format {said.get('format')!r} is not supported", path)
    return CompressedTensors(path, said)
