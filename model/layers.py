"""The two halves of a decoder layer, over whatever operations the device brings.

Knows neither files nor devices. Legend: T tokens, D hidden size, F intermediate size, Hq query heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.ops.interface import AttentionTables, LayerKV, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a group share in one forward."""

    positions: Tensor  # [T]
    slots: Tensor  # [T]
    tables: AttentionTables


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention: one product for q, k and v, heads of the query first."""

    qkv: PackedLinear
    out: PackedLinear
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    norm_eps: float
    scale: float
    window: int | None

    def __call__(self, x: Tensor, ops: Ops, cos_sin: Tensor, step: Step, kv: LayerKV) -> Tensor:
        """x [T, D] -> [T, D]; writes the keys and values of the step before it reads them."""
        qkv = ops.linear(x, self.qkv)
        q = ops.rope_write(
            qkv, self.q_norm, self.k_norm, self.norm_eps, cos_sin, step.positions, step.slots, kv
        )  # [T, Hq, d]
        return ops.linear(ops.attention(q, kv, step.tables, self.scale, self.window), self.out)


@dataclass(frozen=True, slots=True)
class MLP:
    """SwiGLU: one product for gate and up, gate first."""

    gate_up: PackedLinear
    down: PackedLinear

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]."""
        return ops.linear(ops.silu_mul(ops.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True, slots=True)
class Layer:
    """Pre-norm: both halves read a normed copy, and their outputs join the residual stream at the next norm."""

    attention_norm: Tensor  # [D]
    attention: Attention
    mlp_norm: Tensor  # [D]
    mlp: MLP

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        norms = (self.attention_norm, self.mlp_norm, self.attention.q_norm, self.attention.k_norm)
        return sum(linear.nbytes for linear in self.linears) + sum(norm.nbytes for norm in norms if norm is not None)
