"""The operations of model/ops/interface.py through the native library, on CPU tensors.

Knows pointers and shapes, no model; the arithmetic is in csrc/. fp32 and bf16 are native, and caches of 8 bits; other
dtypes go to the reference operations.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.ops.cpu.build import UnavailableError
from model.ops.cpu.memory import WeightMemory
from model.ops.cpu.packed import QUANTIZED, FloatLinear, RoundedLinear, is_bf16, pointer
from model.ops.cpu.sampling import SIGNATURES as SAMPLING
from model.ops.cpu.sampling import sample
from model.ops.cpu.whole_step import KV_KINDS, WholeStep, page_stride
from model.ops.interface import AttentionTables, LayerKV, PackedLinear
from model.ops.reference import ReferenceOps

NATIVE = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 512
PTR, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "rw_linear": (PTR, INT, PTR, INT, PTR, PTR, INT, LONG, LONG, LONG),
    "rw_linear_int8": (PTR, INT, PTR, PTR, PTR, INT, LONG, LONG, LONG),
    "rw_linear_int4": (PTR, INT, PTR, PTR, PTR, INT, LONG, LONG, LONG),
    "rw_add_rms_norm": (PTR, PTR, PTR, INT, FLOAT, LONG, LONG, PTR, PTR),
    "rw_silu_mul": (PTR, INT, LONG, LONG, PTR),
    "rw_rope_write": (PTR, PTR, PTR, INT, PTR, FLOAT, PTR, PTR, PTR, *(LONG,) * 5, PTR, PTR, INT, LONG, LONG),
    "rw_attention": (PTR, INT, PTR, PTR, INT, PTR, PTR, PTR, PTR, *(LONG,) * 9, FLOAT),
    "rw_copy_pages": (PTR, PTR, LONG, PTR, PTR, LONG),
    "rw_layers": (PTR, PTR, PTR, PTR),
    **SAMPLING,
}


class CpuOps:
    """Native where the dtype is fp32 or bf16, the reference operations elsewhere."""

    name = "cpu"

    def __init__(self, library: Path) -> None:
        """library: from build.find_library(). Raises OSError if it cannot be loaded, UnavailableError if wrong."""
        # torch is loaded by now, so the library's OpenMP resolves to torch's copy: one pool of threads.
        self._native = ctypes.CDLL(str(library))
        if not self._native.rw_check_dots():
            raise UnavailableError(
                "this CPU's dot products of bytes or bf16 give other values than the portable form: "
                "set ROPEWAY_KERNELS_FLAGS=-DRW_NO_DOTS to do without them"
            )
        for name, types in SIGNATURES.items():
            function = getattr(self._native, name)
            function.argtypes, function.restype, function.errcheck = types, INT, _memory_sufficed
        self._panel: int = self._native.rw_panel()
        self._weights = WeightMemory()
        self._reference = ReferenceOps()
        self.description = f"native kernels, vectors of {self._panel // 2} floats"

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear:
        """quantization: None, int8 or int4. Raises ValueError for another, and with a dtype that is not native."""
        if quantization is not None and quantization not in QUANTIZED:
            raise ValueError(
                f"quantization {quantization!r} is unknown on CPU: use {', '.join(QUANTIZED)}, or leave it out"
            )
        if weight.dtype not in NATIVE:
            return self._reference.pack_linear(weight, bias, quantization)
        wide_bias = None if bias is None else bias.float()
        if quantization is None:
            return FloatLinear.pack(weight, wide_bias, self._panel, self._weights)
        bits = QUANTIZED[quantization]
        return RoundedLinear.pack(weight, wide_bias, self._panel, bits, self._weights)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(packed, (FloatLinear, RoundedLinear)):
            return self._reference.linear(x, packed, out_dtype)
        assert x.shape[1] == packed.in_features and x.dtype in NATIVE, (x.shape, x.dtype, packed)
        out = torch.empty((x.shape[0], packed.out_features), dtype=out_dtype or x.dtype)
        packed.multiply(self._native, x, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in NATIVE:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self._native.rw_add_rms_norm(
            x.data_ptr(), pointer(residual), weight.data_ptr(), is_bf16(x), eps, x.shape[0], x.shape[1],
            out.data_ptr(), total.data_ptr(),
        )  # fmt: skip
        return out, total

    def rope_write(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
    ) -> Tensor:
        _, kv_heads, page_size, head_dim = kv.k.shape
        if not _both_native(qkv, kv):
            return self._reference.rope_write(qkv, q_norm, k_norm, norm_eps, cos_sin, positions, slots, kv)
        tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
        q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype)
        self._native.rw_rope_write(
            qkv.data_ptr(), pointer(q_norm), pointer(k_norm), is_bf16(qkv), q.data_ptr(), norm_eps,
            cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), tokens, heads, kv_heads, head_dim,
            cos_sin.shape[1], kv.k.data_ptr(), kv.v.data_ptr(), KV_KINDS[kv.k.dtype], page_size, page_stride(kv),
        )  # fmt: skip
        return q

    def attention(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        if not _both_native(q, kv):
            return self._reference.attention(q, kv, tables, scale, window)
        tokens, heads, head_dim = q.shape
        sequences = tables.page_table.shape[0]
        out = torch.empty((tokens, heads * head_dim), dtype=q.dtype)
        self._native.rw_attention(
            q.data_ptr(), is_bf16(q), kv.k.data_ptr(), kv.v.data_ptr(), KV_KINDS[kv.k.dtype], out.data_ptr(),
            tables.page_table.data_ptr(), tables.kv_lens.data_ptr(), tables.q_starts.data_ptr(),
            tokens, tables.page_table.stride(0), sequences, heads, kv.k.shape[1], head_dim,
            kv.page_size, page_stride(kv), window or 0, scale,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in NATIVE:
            return self._reference.silu_mul(gate_up)
        rows, columns = gate_up.shape
        out = torch.empty((rows, columns // 2), dtype=gate_up.dtype)
        self._native.rw_silu_mul(gate_up.data_ptr(), is_bf16(gate_up), rows, columns // 2, out.data_ptr())
        return out

    def copy_pages(self, kv: LayerKV, src: Tensor, dst: Tensor) -> None:
        page = kv.k.stride(0) * kv.k.element_size()  # bytes; the scales of a quantised cache lie behind its values
        self._native.rw_copy_pages(kv.k.data_ptr(), kv.v.data_ptr(), page, src.data_ptr(), dst.data_ptr(), len(src))

    def layers_runner(self, decoder: Decoder, kv: KVCache) -> WholeStep | None:
        """All layers in one call, if every one of them is native."""
        pages = [kv.layer(index) for index in range(len(decoder.layers))]
        linears = [linear for layer in decoder.layers for linear in layer.linears]
        if not all(isinstance(linear, (FloatLinear, RoundedLinear)) for linear in linears):
            return None
        native = all(_both_native(decoder.embedding, layer) for layer in pages)
        return WholeStep(self._native, decoder, kv) if native else None

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        return sample(self._native, logits, batch)


def _memory_sufficed(outcome: int, function: Any, arguments: object) -> None:
    """What ctypes calls with the Outcome of csrc/shortage.h, which every operation returns."""
    if outcome:
        raise MemoryError(f"{function.__name__} lacked memory for what it keeps between its parts")


def _both_native(x: Tensor, kv: LayerKV) -> bool:
    return x.dtype in NATIVE and kv.k.dtype in KV_KINDS and kv.k.shape[3] <= MAX_HEAD_DIM
