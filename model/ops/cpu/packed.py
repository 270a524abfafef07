"""Weights of linear layers in the panels that the native library reads, and the calls that multiply by them.

Knows layouts and roundings, no model and no other operation.
A panel is `panel` rows of W side by side, contiguous over K, in words of 32 bits: see csrc/tile.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = 4
"""Bytes of a word: 1 fp32, 2 bf16 or 4 8-bit weights of one output, K ascending."""
MAX_INT8_INPUTS = 2**31 // (255 * 127)
"""So many products of an unsigned and a signed 8-bit value fit in a 32-bit sum."""


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """fp32 or bf16 weights as they came."""

    weight: Tensor  # [panels, words of K, panel] i32
    bias: Tensor | None  # [N] f32
    out_features: int
    in_features: int
    is_bf16: bool

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, panel: int) -> FloatLinear:
        """weight [N, K] fp32 or bf16, bias [N] f32."""
        return cls(into_panels(weight, panel), bias, weight.shape[0], weight.shape[1], is_bf16(weight))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return False  # panels are a copy

    def multiply(self, native: ctypes.CDLL, x: Tensor, out: Tensor) -> None:
        """x [M, K], out [M, N], fp32 or bf16."""
        native.rw_linear(
            x.data_ptr(), is_bf16(x), self.weight.data_ptr(), self.is_bf16, pointer(self.bias),
            out.data_ptr(), is_bf16(out), x.shape[0], self.out_features, self.in_features,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """Weights rounded to 8 bits, one scale per output."""

    weight: Tensor  # [panels, words of K, panel] i32: four bytes of w + 128
    scale: Tensor  # [N] f32
    bias: Tensor | None  # [N] f32
    out_features: int
    in_features: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, panel: int) -> Int8Linear:
        """Symmetric: the largest weight of a row becomes 127. weight [N, K] f32."""
        assert weight.shape[1] <= MAX_INT8_INPUTS, weight.shape
        scale = weight.abs().amax(1) / 127
        rounded = (weight / scale.clamp(min=1e-30).unsqueeze(1)).round_().add_(128).to(torch.uint8)
        return cls(into_panels(rounded, panel), scale, bias, weight.shape[0], weight.shape[1])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return False

    def multiply(self, native: ctypes.CDLL, x: Tensor, out: Tensor) -> None:
        """x [M, K], out [M, N], fp32 or bf16."""
        native.rw_linear_int8(
            x.data_ptr(), is_bf16(x), self.weight.data_ptr(), self.scale.data_ptr(), pointer(self.bias),
            out.data_ptr(), is_bf16(out), x.shape[0], self.out_features, self.in_features,
        )  # fmt: skip


def into_panels(weight: Tensor, panel: int) -> Tensor:
    """[N, K] of any width up to a word -> [panels, words of K, panel] i32; what is added to N and K is zero."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % (WORD // weight.itemsize), 0, -rows % panel))
    words = padded.contiguous().view(torch.int32)
    return words.view(-1, panel, words.shape[1]).transpose(1, 2).contiguous()


def is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
