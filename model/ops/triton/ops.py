"""The operations of model/ops/interface.py as Triton kernels, on CUDA tensors.

Knows shapes and launches, no model. Nothing reads a tensor on the host, so every call can be captured in a CUDA graph.
Under batch_invariant a row does not depend on its batch: matrix products go through one kernel with one tile (sums of
int8 are exact in any order), attention cuts keys at fixed multiples, and decode and prefill share a tile of rows, so
that both run the same instructions. Left to the hardware is that a matrix instruction gives a row the same bits at
every place of its tile, and to the compiler that two kernels round alike that inline the same code: the interpreter
cannot show these two, a GPU must.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.batch import SampleBatch, Sampled
from model.ops.attention_backends import Attention
from model.ops.interface import AttentionTables, LayerKV, PackedLinear
from model.ops.triton import layer, sampling
from model.ops.triton.attention import PagedAttention
from model.ops.triton.linear import GPULinear
from model.ops.triton.scaled import TritonScaledLinear

PROCESSORS_WITHOUT_A_GPU = 16
"""What the interpreter pretends to have."""


class TritonOps:
    """The Ops protocol; see model/ops/interface.py for the meaning of every operation."""

    name = "triton"

    def __init__(
        self, batch_invariant: bool = False, processors: int | None = None, attention: Attention | None = None
    ) -> None:
        """processors: of the chip, by default of the current CUDA device. attention: another one in place of ours."""
        self.batch_invariant = batch_invariant
        count = _processors() if processors is None else processors
        self._attention = attention or PagedAttention(count, batch_invariant)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, quantization: str | None = None
    ) -> GPULinear | TritonScaledLinear:
        """quantization: None, int8 or fp8; obstacle() in model/ops/scaled_linear.py tells where it cannot be had."""
        if quantization is None:
            return GPULinear(weight, bias, self.batch_invariant)
        return TritonScaledLinear.pack(weight, bias, quantization)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        assert isinstance(packed, GPULinear | TritonScaledLinear)
        return packed(x, x.dtype if out_dtype is None else out_dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return layer.add_rms_norm(x, residual, weight, eps)

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
        return layer.rope_write(qkv, q_norm, k_norm, norm_eps, cos_sin, positions, slots, kv)

    def attention(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        return self._attention(q, kv, tables, scale, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return layer.silu_mul(gate_up)

    def copy_pages(self, kv: LayerKV, src: Tensor, dst: Tensor) -> None:
        layer.copy_pages(kv, src, dst)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        return sampling.sample(logits, batch)


def _processors() -> int:
    if not torch.cuda.is_available():
        return PROCESSORS_WITHOUT_A_GPU
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
