"""The pool of KV pages: one storage tensor per group of layers, allocated once.

Knows neither requests nor which page is whose; page 0 of every group is scratch.
"""

from __future__ import annotations

import torch

from model.kv_cost import KVLayout
from model.ops.interface import LayerKV


class KVCache:
    """Storage of a group: [layers, 2 (k, v), num_pages, Hkv, page_size, d]. Contents start undefined.

    On a CPU the system commits memory at first touch, so an idle pool costs next to nothing.
    """

    def __init__(self, layout: KVLayout, num_pages: tuple[int, ...], device: torch.device | str) -> None:
        assert len(num_pages) == len(layout.groups), (num_pages, len(layout.groups))
        self.layout = layout
        self.num_pages = num_pages
        self.storages = tuple(
            torch.empty(
                (len(group.layers), 2, pages, group.kv_heads, layout.page_size, group.head_dim),
                dtype=getattr(torch, group.dtype),
                device=device,
            )
            for group, pages in zip(layout.groups, num_pages, strict=True)
        )
        self._place = {
            layer: (index, row) for index, group in enumerate(layout.groups) for row, layer in enumerate(group.layers)
        }
        self._layers = tuple(self._view(*self._place[layer]) for layer in sorted(self._place))

    def _view(self, group: int, row: int) -> LayerKV:
        k, v = self.storages[group].unbind(0)[row].unbind(0)
        return LayerKV(k, v)

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
