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
GROUP = 64
"""Inputs that share the scale of a 4-bit weight: see csrc/linear_int4.cpp."""
SHRINKINGS = (1.0, 0.9, 0.8)
"""Scales of a group that are tried, relative to the one at which nothing is cut off."""
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


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """Weights rounded to 4 bits, one scale per output and GROUP inputs."""

    weight: Tensor  # [panels, groups, GROUP / 8 * panel words and panel / 2 words of scales] i32
    bias: Tensor | None  # [N] f32
    out_features: int
    in_features: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, panel: int) -> Int4Linear:
        """Scales of bf16, of either sign, those of SHRINKINGS that miss least. weight [N, K] f32."""
        outputs, inputs = weight.shape
        padded = F.pad(weight, (0, -inputs % GROUP, 0, -outputs % panel))
        groups = padded.view(padded.shape[0], -1, GROUP)
        scale = best_int4_scales(groups)
        codes = int4_codes(groups, scale).add_(8).to(torch.uint8)
        halves = codes.view(*codes.shape[:2], -1, 2, WORD)  # [N, groups, steps, half, byte]
        words = (halves[..., 0, :] | halves[..., 1, :] << 4).view(torch.int32).squeeze(3)
        parts = (_turned(words, panel).flatten(2), _turned(scale.unsqueeze(2), panel).flatten(2).view(torch.int32))
        return cls(torch.cat(parts, 2), bias, outputs, inputs)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return False

    def multiply(self, native: ctypes.CDLL, x: Tensor, out: Tensor) -> None:
        """x [M, K], out [M, N], fp32 or bf16."""
        native.rw_linear_int4(
            x.data_ptr(), is_bf16(x), self.weight.data_ptr(), pointer(self.bias),
            out.data_ptr(), is_bf16(out), x.shape[0], self.out_features, self.in_features,
        )  # fmt: skip


def best_int4_scales(groups: Tensor) -> Tensor:
    """[N, groups, GROUP] f32 -> [N, groups] bf16: the largest weight at -8 or cut off, by the least squares."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    best, least = torch.zeros_like(largest, dtype=torch.bfloat16), torch.full_like(largest, torch.inf)
    for shrinking in SHRINKINGS:
        scale = (largest * (shrinking / -8)).to(torch.bfloat16)
        error = (int4_codes(groups, scale).mul_(scale.float().unsqueeze(2)).sub_(groups)).square_().sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def int4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Whole numbers from -8 to 7; f32 as groups."""
    divisor = torch.where(scale == 0, 1, scale.float()).unsqueeze(2)
    return (groups / divisor).round_().clamp_(-8, 7)


def _turned(values: Tensor, panel: int) -> Tensor:
    """[N, groups, steps] -> [panels, groups, steps, panel]."""
    return values.view(-1, panel, *values.shape[1:]).permute(0, 2, 3, 1).contiguous()


def into_panels(weight: Tensor, panel: int) -> Tensor:
    """[N, K] of any width up to a word -> [panels, words of K, panel] i32; what is added to N and K is zero."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % (WORD // weight.itemsize), 0, -rows % panel))
    words = padded.contiguous().view(torch.int32)
    return words.view(-1, panel, words.shape[1]).transpose(1, 2).contiguous()


QUANTIZED: dict[str, type[Int8Linear] | type[Int4Linear]] = {"int8": Int8Linear, "int4": Int4Linear}
"""What --quantization may ask for."""


def is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
