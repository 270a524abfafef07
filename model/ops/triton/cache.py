"""How a layer's cache is handed to kernels.

Knows the page layouts of model/kv_cache.py (plain, or 8 bits with scales), no operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.ops.interface import LayerKV

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def kind(kv: LayerKV) -> str:
    """ "" for a plain cache, else how its 8 bits are read."""
    return KINDS.get(kv.k.dtype, "")


def pointers(kv: LayerKV) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v, k_scale, v_scale; of a plain cache k and v again, which are not read as scales. e4m3 goes as its bits."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k, kv.v, kv.k, kv.v
    if kind(kv) == "fp8":
        return kv.k.view(torch.uint8), kv.v.view(torch.uint8), kv.k_scale, kv.v_scale
    return kv.k, kv.v, kv.k_scale, kv.v_scale


def strides(kv: LayerKV) -> tuple[int, int, int, int, int]:
    """Of pages, heads and tokens, in elements; of pages and heads of the scales. k and v have the same."""
    page, head, token, _ = kv.k.stride()
    scale_page, scale_head = (0, 0) if kv.k_scale is None else kv.k_scale.stride()[:2]
    return page, head, token, scale_page, scale_head
