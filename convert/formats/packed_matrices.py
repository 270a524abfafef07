"""GPTQ, AWQ and MLX: small integers packed into words, in groups with a scale and a zero point or a bias.

Knows nothing of folders. What it cannot say exactly it refuses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import Float32
from convert.errors import ConvertError
from convert.formats.packed_numbers import Integers, unpack, unpack_rows
from convert.formats.quantised_scheme import Parts, Scheme, check_groups, numbers, stored, tiled

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbouring columns lies in a word: packed as columns 0, 2, 4, 6, 1, 3, 5, 7."""
PIECE = 512


class Gptq(Scheme):
    """A word holds neighbouring inputs of one output, or zero points of neighbouring outputs (version 1: less one)."""

    values, dtypes = "qweight", frozenset({"I32"})
    others = ("qzeros", "scales", "g_idx")

    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        bits, packed = self.setting("bits", 2, 4, 8), parts["qweight"].shape
        self.setting("checkpoint_format", None, "gptq", "gptq_v2")
        self.setting("is_marlin_format", None, False)
        self.setting("dynamic", None, {})
        self.need(name, parts, "qzeros", "scales")
        if len(packed) != 2 or len(parts["scales"].shape) != 2:
            raise ConvertError(f"{name} is not a matrix", parts["qweight"].path, parts["qweight"].offset)
        inputs, outputs, groups = packed[0] * 32 // bits, packed[1], parts["scales"].shape[0]
        self.fits(name, parts["scales"], (groups, outputs))
        self.fits(name, parts["qzeros"], (groups, outputs * bits // 32))
        if "g_idx" in parts:
            self.fits(name, parts["g_idx"], (inputs,))
        elif inputs % groups:
            raise ConvertError(f"{name}: {groups} groups do not divide {inputs}", parts["scales"].path)
        return outputs, inputs

    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        bits, (outputs, inputs) = int(self.said["bits"]), shape
        scales = numbers(parts["scales"])
        zeros = unpack(stored(parts["qzeros"]), bits)
        if self.said.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros + 1) & np.uint8((1 << bits) - 1)
        groups = np.arange(inputs) // (inputs // len(scales))
        if "g_idx" in parts:
            groups = stored(parts["g_idx"])
            check_groups(parts["g_idx"], groups, len(scales))
        out = np.empty(shape, np.float32)
        words = stored(parts["qweight"])
        for start in range(0, outputs, PIECE):
            rows = slice(start, start + PIECE)
            values = unpack(np.ascontiguousarray(words[:, rows].T), bits)
            out[rows] = (values - zeros[groups, rows].T.astype(np.float32)) * scales[groups, rows].T
        return out


class Awq(Scheme):
    """4 bits, eight outputs in a word in an order of their own; zero points as stored. Only the GEMM layout."""

    values, dtypes = "qweight", frozenset({"I32"})
    others = ("qzeros", "scales")

    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        if "w_bit" not in self.said:
            self.setting("bits", 4)
        else:
            self.setting("w_bit", 4)
        if str(self.said.get("version", "gemm")).lower() != "gemm":
            self.setting("version", "gemm")
        self.setting("zero_point", None, True)
        self.need(name, parts, "qzeros", "scales")
        packed, scales = parts["qweight"].shape, parts["scales"].shape
        if len(packed) != 2 or len(scales) != 2 or not scales[0] or packed[0] % scales[0]:
            text = f"{name}: scales {scales} do not fit qweight {packed}"
            raise ConvertError(text, parts["qweight"].path, parts["qweight"].offset)
        self.fits(name, parts["scales"], (scales[0], packed[1] * 8))
        self.fits(name, parts["qzeros"], (scales[0], packed[1]))
        return packed[1] * 8, packed[0]

    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        inputs, scales = shape[1], numbers(parts["scales"])
        zeros, words = awq_columns(stored(parts["qzeros"])), stored(parts["qweight"])
        group = inputs // len(scales)
        out = np.empty(shape, np.float32)
        for index, start in enumerate(range(0, inputs, group)):
            columns = slice(start, start + group)
            values = awq_columns(words[columns]).astype(np.float32) - zeros[index]
            out[:, columns] = (values * scales[index]).T
        return out


def awq_columns(words: Integers) -> NDArray[np.uint8]:
    """[n, m] words -> [n, 8 m] values in the order of the columns."""
    values = unpack(np.ascontiguousarray(words), 4).reshape(*words.shape, 8)
    return values[..., list(AWQ_ORDER)].reshape(words.shape[0], -1)


class Mlx(Scheme):
    """Groups of a row's columns: value times scale plus bias, the lowest bits first."""

    values, dtypes = "weight", frozenset({"U32"})
    others = ("scales", "biases")

    def shape(self, name: str, parts: Parts) -> tuple[int, int]:
        bits = self.setting("bits", 2, 4, 8)
        self.setting("mode", None, "affine")
        if special := [key for key in self.said if key not in ("bits", "group_size", "mode", "quant_method")]:
            raise ConvertError(f"mlx: {special[0]} has settings of its own, which is not supported", self.path)
        self.need(name, parts, "scales", "biases")
        packed, scales = parts["weight"].shape, parts["scales"].shape
        columns = packed[-1] * 32 // bits if len(packed) == 2 else 0
        if len(scales) != 2 or not scales[1] or not columns or columns % scales[1]:
            text = f"{name}: scales {scales} do not fit {packed}"
            raise ConvertError(text, parts["weight"].path, parts["weight"].offset)
        self.fits(name, parts["scales"], (packed[0], scales[1]))
        self.fits(name, parts["biases"], (packed[0], scales[1]))
        return packed[0], columns

    def read(self, parts: Parts, shape: tuple[int, int]) -> Float32:
        scales, biases = numbers(parts["scales"]), numbers(parts["biases"])
        out = unpack_rows(stored(parts["weight"]), int(self.said["bits"]), shape[1])
        tile = (1, shape[1] // scales.shape[1])
        tiled(out, scales, tile, np.multiply)
        tiled(out, biases, tile, np.add)
        return out
