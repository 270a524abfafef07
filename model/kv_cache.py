"""The pool of KV pages: one storage tensor per group of layers, allocated once.

Knows neither requests nor which page is whose; page 0 of every group is scratch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.huge_pages import in_huge_pages
from model.kv_cost import DTYPE_BYTES, KVGroup, KVLayout
from model.ops.interface import LayerKV


class KVCache:
    """Storage of a group: [layers, 2 (k, v), num_pages, Hkv, page_size, d]. Contents start undefined.

    Of a quantised group: bytes [layers, 2, num_pages, Hkv, page_size * (d + 4)], where the values of a head's page come
    first and their fp32 scales behind them. On a CPU the system commits memory at first touch, a huge page at a time:
    an idle pool costs little.
    """

    def __init__(self, layout: KVLayout, num_pages: tuple[int, ...], device: torch.device | str) -> None:
        assert len(num_pages) == len(layout.groups), (num_pages, len(layout.groups))
        self.layout = layout
        self.num_pages = num_pages
        self.storages = tuple(
            _allocate(group, pages, layout.page_size, device)
            for group, pages in zip(layout.groups, num_pages, strict=True)
        )
        self._place = {
            layer: (index, row) for index, group in enumerate(layout.groups) for row, layer in enumerate(group.layers)
        }
        self._layers = tuple(self._view(*self._place[layer]) for layer in sorted(self._place))

    def _view(self, group: int, row: int) -> LayerKV:
        k, v = self.storages[group].unbind(0)[row].unbind(0)
        kind, size = self.layout.groups[group], self.layout.page_size
        if not kind.scale_bytes:
            return LayerKV(k, v)
        (k, k_scale), (v, v_scale) = (_values_and_scales(pages, kind, size) for pages in (k, v))
        return LayerKV(k, v, k_scale, v_scale)

    def layer(self, layer: int) -> LayerKV:
        """Views of one layer's keys and values."""
        return self._layers[layer]

    def group_of(self, layer: int) -> int:
        """Index of the group whose page table and slots the layer uses."""
        return self._place[layer][0]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, as the storages report them."""
        return sum(storage.untyped_storage().nbytes() for storage in self.storages)


def _allocate(group: KVGroup, pages: int, page_size: int, device: torch.device | str) -> Tensor:
    places = (len(group.layers), 2, pages, group.kv_heads)
    if not group.scale_bytes:
        return _room((*places, page_size, group.head_dim), getattr(torch, group.dtype), device)
    values = page_size * group.head_dim * DTYPE_BYTES[group.dtype]
    assert values % group.scale_bytes == 0, f"scales of pages of {values} bytes are not aligned"
    return _room((*places, values + page_size * group.scale_bytes), torch.uint8, device)


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return in_huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _values_and_scales(pages: Tensor, group: KVGroup, page_size: int) -> tuple[Tensor, Tensor]:
    """pages [num_pages, Hkv, bytes] -> views [num_pages, Hkv, page_size, d] and f32 [num_pages, Hkv, page_size]."""
    end = pages.shape[2] - page_size * group.scale_bytes
    values = pages[:, :, :end].view(getattr(torch, group.dtype))
    return values.view(*pages.shape[:2], page_size, group.head_dim), pages[:, :, end:].view(torch.float32)
