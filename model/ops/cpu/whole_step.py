"""All layers of a decoder in one native call: what the layers are is told once, what a step brings each time.

Knows where tensors lie, no arithmetic. The structures mirror csrc/step.cpp, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from model.decoder import Decoder
from model.kv_cache import KVCache
from model.layers import Layer, Step
from model.ops.cpu.packed import FloatLinear, RoundedLinear, is_bf16, pointer
from model.ops.interface import LayerKV, PackedLinear

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
"""Kinds of weights."""
KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""What a slot of the cache may hold, as csrc/slots.h numbers it."""


class _Linear(ctypes.Structure):
    _fields_ = (
        ("kind", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("kv_kind", "q_heads", "kv_heads", "head_dim", "page_size", "page_stride")),
        *((name, c_int64) for name in ("window", "group")),
        *((name, c_float) for name in ("scale", "head_norm_eps")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, c_int64) for name in ("layer_count", "hidden", "is_bf16")),
        *((name, c_void_p) for name in ("norm", "cos_sin")),
        ("rotary", c_int64),
        ("eps", c_float),
    )


class _Group(ctypes.Structure):
    _fields_ = (("slots", c_void_p), ("page_table", c_void_p), ("table_width", c_int64))


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tokens", "sequences")),
        *((name, c_void_p) for name in ("positions", "kv_lens", "q_starts")),
        ("groups", ctypes.POINTER(_Group)),
    )


class WholeStep:
    """The layers of one decoder over one cache, whose tensors it points into: it must not outlive them."""

    def __init__(self, native: ctypes.CDLL, decoder: Decoder, kv: KVCache) -> None:
        """All of it native: see CpuOps.layers_runner."""
        self._native = native
        self._layers = (_Layer * len(decoder.layers))(
            *(_layer(layer, kv, index) for index, layer in enumerate(decoder.layers))
        )
        self._model = _Model(
            layers=self._layers, layer_count=len(decoder.layers), hidden=decoder.embedding.shape[1],
            is_bf16=is_bf16(decoder.embedding), norm=decoder.norm.data_ptr(), cos_sin=decoder.cos_sin.data_ptr(),
            rotary=decoder.cos_sin.shape[1], eps=decoder.config.rms_norm_eps,
        )  # fmt: skip

    def __call__(self, x: Tensor, steps: Sequence[Step]) -> Tensor:
        """x [T, D] embeddings, overwritten -> [T, D] after the last norm."""
        out, first = torch.empty_like(x), steps[0]
        groups = (_Group * len(steps))(*map(_group, steps))
        batch = _Batch(
            tokens=x.shape[0], sequences=first.tables.page_table.shape[0], positions=first.positions.data_ptr(),
            kv_lens=first.tables.kv_lens.data_ptr(), q_starts=first.tables.q_starts.data_ptr(), groups=groups,
        )  # fmt: skip
        self._native.rw_layers(ctypes.byref(self._model), ctypes.byref(batch), x.data_ptr(), out.data_ptr())
        return out


def _group(step: Step) -> _Group:
    table = step.tables.page_table
    return _Group(slots=step.slots.data_ptr(), page_table=table.data_ptr(), table_width=table.stride(0))


def _layer(layer: Layer, kv: KVCache, index: int) -> _Layer:
    attention, pages = layer.attention, kv.layer(index)
    _, kv_heads, page_size, head_dim = pages.k.shape
    return _Layer(
        attention_norm=layer.attention_norm.data_ptr(), mlp_norm=layer.mlp_norm.data_ptr(),
        q_norm=pointer(attention.q_norm), k_norm=pointer(attention.k_norm), head_norm_eps=attention.norm_eps,
        qkv=_linear(attention.qkv), out=_linear(attention.out),
        gate_up=_linear(layer.mlp.gate_up), down=_linear(layer.mlp.down),
        k=pages.k.data_ptr(), v=pages.v.data_ptr(), kv_kind=KV_KINDS[pages.k.dtype],
        q_heads=attention.qkv.out_features // head_dim - 2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, page_stride=page_stride(pages), window=attention.window or 0,
        group=kv.group_of(index), scale=attention.scale,
    )  # fmt: skip


def _linear(packed: PackedLinear) -> _Linear:
    assert isinstance(packed, (FloatLinear, RoundedLinear)), packed
    if isinstance(packed, FloatLinear):
        kind = BFLOAT16 if packed.is_bf16 else FLOAT32
    else:
        kind = {8: INT8, 4: INT4}[packed.bits]
    return _Linear(
        kind=kind, weight=packed.weight.data_ptr(), bias=pointer(packed.bias),
        outputs=packed.out_features, inputs=packed.in_features,
    )  # fmt: skip


def page_stride(kv: LayerKV) -> int:
    """Elements from one page of a layer to the next; heads follow one another, each with its scales, if it has any."""
    _, kv_heads, page_size, head_dim = kv.k.shape
    strides, scale = kv.k.stride(), 0 if kv.k_scale is None else kv.k_scale.element_size()
    assert strides[2:] == (head_dim, 1), strides
    assert kv_heads == 1 or strides[1] == page_size * (head_dim + scale), strides
    assert strides == kv.v.stride(), (strides, kv.v.stride())
    for values, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        assert scales is None or scales.data_ptr() == values.data_ptr() + page_size * head_dim, (
            "scales are not in the page"
        )
    return strides[0]
