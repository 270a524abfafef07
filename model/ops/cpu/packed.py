"""Weights of linear layers in the panels that the native library reads, and the calls that multiply by them.

Knows layouts, no model and no other operation; how weights are rounded is in rounding.py.
A panel is `panel` rows of W side by side, contiguous over K, in words of 32 bits: see csrc/tile.h.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.cpu.memory import WeightMemory
from model.ops.cpu.rounding import ROUNDINGS

WORD = 4
"""Bytes of a word: 1 fp32, 2 bf16 or 4 8-bit weights of one output, K ascending."""
BLOCK_BYTES = 8 << 20
"""fp32 weights that are packed at a time, unless a panel holds more; rounding takes about eleven times as much."""


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """fp32 or bf16 weights as they came."""

    weight: Tensor  # [panels, words of K, panel] i32
    bias: Tensor | None  # [N] f32
    out_features: int
    in_features: int
    is_bf16: bool

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, panel: int, memory: WeightMemory) -> FloatLinear:
        """weight [N, K] fp32 or bf16, bias [N] f32."""
        packed = _in_blocks(weight, panel, memory, lambda rows: into_panels(rows, panel))
        return cls(packed, bias, weight.shape[0], weight.shape[1], is_bf16(weight))

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
class RoundedLinear:
    """Weights rounded to 8 or 4 bits, with factors per output and group of inputs: see rounding.py."""

    weight: Tensor  # [panels, groups, words of codes, then of factors] i32
    bias: Tensor | None  # [N] f32
    out_features: int
    in_features: int
    bits: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, panel: int, bits: int, memory: WeightMemory) -> RoundedLinear:
        """weight [N, K] fp32 or bf16, bias [N] f32; bits: 8 or 4."""
        packed = _in_blocks(weight, panel, memory, lambda rows: _rounded_panels(rows.float(), panel, bits))
        return cls(packed, bias, weight.shape[0], weight.shape[1], bits)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: Tensor) -> bool:
        return False

    def multiply(self, native: ctypes.CDLL, x: Tensor, out: Tensor) -> None:
        """x [M, K], out [M, N], fp32 or bf16."""
        function = native.rw_linear_int8 if self.bits == 8 else native.rw_linear_int4
        function(
            x.data_ptr(), is_bf16(x), self.weight.data_ptr(), pointer(self.bias),
            out.data_ptr(), is_bf16(out), x.shape[0], self.out_features, self.in_features,
        )  # fmt: skip


def _in_blocks(weight: Tensor, panel: int, memory: WeightMemory, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """pack [N, K] -> [panels, ..], block after block of rows, so that beside weight and result little is in memory."""
    rows = max(1, BLOCK_BYTES // (4 * panel * weight.shape[1])) * panel
    blocks = (pack(weight[start : start + rows]) for start in range(0, weight.shape[0], rows))
    first = next(blocks)
    packed = memory.room((-(-weight.shape[0] // panel), *first.shape[1:]), first.dtype)
    at = 0
    for block in itertools.chain([first], blocks):
        packed[at : at + len(block)] = block
        at += len(block)
    return packed


def _rounded_panels(weight: Tensor, panel: int, bits: int) -> Tensor:
    """[n, K] f32 -> [panels, groups, words] i32, rows added to fill the last panel."""
    codes, factors = ROUNDINGS[bits](F.pad(weight, (0, 0, 0, -weight.shape[0] % panel)))
    if bits == 4:
        halves = codes.view(*codes.shape[:2], -1, 2, WORD)  # [n, groups, steps, half, byte]
        codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2)
    return torch.cat((_by_panel(codes.view(torch.int32), panel), _by_panel(factors, panel)), 2)


def _by_panel(values: Tensor, panel: int) -> Tensor:
    """[N, groups, steps] of 16 or 32 bits -> [panels, groups, words] i32, the columns of a step side by side."""
    by_step = values.view(-1, panel, *values.shape[1:]).permute(0, 2, 3, 1)
    return by_step.contiguous().flatten(2).view(torch.int32)


def into_panels(weight: Tensor, panel: int) -> Tensor:
    """[N, K] of any width up to a word -> [panels, words of K, panel] i32, a view; what is added to N and K is zero."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % (WORD // weight.itemsize), 0, -rows % panel))
    words = padded.contiguous().view(torch.int32)
    return words.view(-1, panel, words.shape[1]).transpose(1, 2)


QUANTIZED = {"int8": 8, "int4": 4}
"""What --quantization may ask for -> bits."""


def is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
