"""Pages of a sequence against a simulation that keeps a set of page numbers, and the cache of one rank."""

from __future__ import annotations

import pytest

from model.kv_cost import KVGroup, KVLayout

GROUP = KVGroup(layers=(0, 1), window=None, kv_heads=8, head_dim=64, dtype="bfloat16")
WINDOW = KVGroup(layers=(2,), window=6, kv_heads=8, head_dim=64, dtype="bfloat16")


def held_pages(context: int, page_size: int, window: int | None, chunk: int) -> list[int]:
    """Pages held in each step of a sequence that grows to context, chunk tokens at a time."""
    counts = []
    for start in range(0, context, chunk):
        end = min(context, start + chunk)
        first = 0 if window is None else max(0, start - window + 1)
        counts.append(len({token // page_size for token in range(first, end)}))
    return counts


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_at_is_what_the_last_step_holds(window: int | None, page_size: int) -> None:
    group = KVGroup((0,), window, 2, 8, "float32")
    for context in range(1, 80):
        assert group.pages_at(context, page_size) == held_pages(context, page_size, window, 1)[-1]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_peak_pages_is_never_exceeded_and_reached_in_decode(window: int | None, page_size: int) -> None:
    group = KVGroup((0,), window, 2, 8, "float32")
    for context in range(1, 80):
        assert group.peak_pages(context, page_size, chunk=7) >= max(held_pages(context, page_size, window, 7))
    assert group.peak_pages(200, page_size) == max(held_pages(200, page_size, window, 1))


def test_a_rank_holds_its_share_of_the_heads_or_a_copy() -> None:
    layout = KVLayout(16, (GROUP, WINDOW))
    assert layout.shard(4).token_bytes * 4 == layout.token_bytes
    assert layout.shard(16).token_bytes * 8 == layout.token_bytes  # 16 ranks hold two copies in sum
    with pytest.raises(ValueError, match="8 KV heads cannot be shared evenly by 3"):
        layout.shard(3)


def test_pages_of_every_group() -> None:
    layout = KVLayout(4, (GROUP, WINDOW))
    assert layout.pages_at(30) == (8, 2)
    assert layout.peak_pages(30) == (8, 3)
