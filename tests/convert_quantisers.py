"""Quantises matrices into the stored tensors of each scheme, a number at a time, as their libraries pack them.

Knows nothing of the converter. Every function returns the stored parts and the matrix that they stand for, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Quantised = tuple[dict[str, torch.Tensor], Matrix]
GROUP = 16


def words(bit_rows: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> torch.Tensor:
    """Each word from its (value, shift) pairs."""
    packed = [sum(value << shift for value, shift in pairs) for pairs in bit_rows]
    return torch.from_numpy(np.array(packed, np.uint32).view(np.int32).reshape(shape).copy())


def packed_rows(values: NDArray[Any], bits: int) -> torch.Tensor:
    """Neighbours of a row share a word, the first in the lowest bits."""
    per = 32 // bits
    pairs = [
        [(int(value), bits * k) for k, value in enumerate(row[start : start + per])]
        for row in values
        for start in range(0, len(row), per)
    ]
    return words(pairs, (len(values), values.shape[1] // per))


def affine(matrix: Matrix, bits: int) -> tuple[NDArray[Any], Matrix, NDArray[Any]]:
    """Integers from 0 up [out, in], scales and zero points [out, groups], group by group along a row."""
    groups = matrix.reshape(matrix.shape[0], -1, GROUP)
    low, high = groups.min(-1), groups.max(-1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1).astype(int)
    values = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 2**bits - 1).astype(int)
    return values.reshape(matrix.shape), scales, zeros


def meaning(values: NDArray[Any], scales: Matrix, zeros: NDArray[Any], groups: NDArray[Any]) -> Matrix:
    """(value - zero) * scale, with the group of each column."""
    weights: Matrix = (values - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    return weights


def in_order(columns: int) -> NDArray[Any]:
    return np.arange(columns) // GROUP


def gptq(matrix: Matrix, bits: int = 4, version: int = 1, shuffled: bool = False) -> Quantised:
    values, scales, zeros = affine(matrix, bits)
    groups = in_order(matrix.shape[1])
    if shuffled:
        groups = np.random.default_rng(len(groups)).permutation(groups)
    stored_zeros = zeros - 1 if version == 1 else zeros
    parts = {
        "qweight": packed_rows(values, bits).T.contiguous(), "qzeros": packed_rows(stored_zeros.T, bits),
        "scales": torch.from_numpy(scales.T.copy()).half(), "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }  # fmt: skip
    return parts, meaning(values, scales, zeros, groups)


def awq(matrix: Matrix) -> Quantised:
    values, scales, zeros = affine(matrix, 4)
    outputs, inputs = matrix.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows: NDArray[Any]) -> torch.Tensor:
        pairs = [[(int(row[8 * c + order[i]]), 4 * i) for i in range(8)] for row in rows for c in range(outputs // 8)]
        return words(pairs, (len(rows), outputs // 8))

    parts = {"qweight": packed(values.T), "qzeros": packed(zeros.T), "scales": torch.from_numpy(scales.T.copy()).half()}
    return parts, meaning(values, scales, zeros, in_order(inputs))


def mlx(matrix: Matrix, bits: int = 4) -> Quantised:
    values, scales, zeros = affine(matrix, bits)
    biases = (-scales * zeros).astype(np.float16)
    packed = packed_rows(values, bits).view(torch.uint32)
    parts = {"weight": packed, "scales": torch.from_numpy(scales).half(), "biases": torch.from_numpy(biases)}
    groups = in_order(matrix.shape[1])
    return parts, values.astype(np.float32) * scales[:, groups] + biases.astype(np.float32)[:, groups]


def packed_integers(matrix: Matrix, bits: int = 4, symmetric: bool = True, shuffled: bool = False) -> Quantised:
    """compressed-tensors: values moved to start at 0, packed along a row; zero points packed along the rows."""
    values, scales, zeros = affine(matrix, bits)
    middle, (rows, columns) = 1 << (bits - 1), matrix.shape
    if symmetric:
        zeros = np.full_like(zeros, middle)
    groups = in_order(columns)
    if shuffled:
        groups = np.random.default_rng(columns).permutation(groups)
    parts = {
        "weight_packed": packed_rows(values, bits), "weight_shape": torch.tensor([rows, columns]),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
    }  # fmt: skip
    scales = parts["weight_scale"].float().numpy()
    if not symmetric:
        parts["weight_zero_point"] = packed_rows(zeros.T, bits).T.contiguous()
    if shuffled:
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, meaning(values, scales, zeros, groups)


def fp8(matrix: Matrix, scale_shape: str, name: str = "weight_scale") -> Quantised:
    """One scale a matrix, a row, or a block of 32 by 32 (the last ones cut)."""
    rows, columns = matrix.shape
    tile = {"tensor": (rows, columns), "channel": (1, columns), "block": (32, 32)}[scale_shape]
    count = (-(-rows // tile[0]), -(-columns // tile[1]))
    scales = np.random.default_rng(rows).uniform(0.001, 0.02, count).astype(np.float32)
    full = scales.repeat(tile[0], 0).repeat(tile[1], 1)[:rows, :columns]
    codes = torch.from_numpy(matrix / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(scales if scale_shape != "tensor" else scales.reshape(()))
    return {"weight": codes, name: scale}, (codes.float().numpy() * full).astype(np.float32)


def int8(matrix: Matrix, symmetric: bool) -> Quantised:
    scales = np.abs(matrix).max(1, keepdims=True) / 127
    zeros = np.zeros_like(scales) if symmetric else np.random.default_rng(0).integers(-5, 6, scales.shape)
    values = np.clip(np.round(matrix / scales) + zeros, -128, 127).astype(np.int8)
    parts = {"weight": torch.from_numpy(values), "weight_scale": torch.from_numpy(scales)}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return parts, (values - zeros).astype(np.float32) * scales


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": []}


CASES: dict[str, tuple[dict[str, Any], Callable[[Matrix], Quantised]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda m: gptq(m, shuffled=True)),
    "gptq 8 bit": ({"quant_method": "gptq", "bits": 8}, lambda m: gptq(m, bits=8)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"}, lambda m: gptq(m, bits=2, version=2)
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, awq),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda m: fp8(m, "block", "weight_scale_inv")
    ),
    "fp8 tensor": ({"quant_method": "fp8"}, lambda m: fp8(m, "tensor")),
    "compressed fp8": (compressed("float-quantized", num_bits=8, type="float"), lambda m: fp8(m, "channel")),
    "compressed int8": (compressed("int-quantized", num_bits=8, type="int"), lambda m: int8(m, True)),
    "compressed int8 zero points": (compressed("int-quantized", num_bits=8, type="int"), lambda m: int8(m, False)),
    "compressed int4": (compressed("pack-quantized", num_bits=4, type="int"), packed_integers),
    "compressed int4 zero points": (
        compressed("pack-quantized", num_bits=4, type="int"), lambda m: packed_integers(m, symmetric=False)
    ),
    "compressed int4 act-order": (
        compressed("pack-quantized", num_bits=4, type="int"), lambda m: packed_integers(m, shuffled=True)
    ),
    "compressed int8 packed": (
        compressed("pack-quantized", num_bits=8, type="int"), lambda m: packed_integers(m, bits=8)
    ),
}  # fmt: skip
