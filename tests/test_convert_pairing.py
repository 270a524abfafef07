"""RoPE pairing: the index map, and what the weights alone tell about it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from convert.rope_pairing import detect_pairing, to_adjacent, to_split_half
from tests.convert_sources import adjacent_rows

Rows = NDArray[np.float32]


def test_map_of_one_head_is_evens_then_odds() -> None:
    rows = np.arange(8, dtype=np.float32)
    assert to_split_half(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_partial_rotary_leaves_the_other_rows_of_each_head() -> None:
    rows = np.arange(12, dtype=np.float32)
    assert to_split_half(rows, 2, rotary=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 9])
def test_map_undoes_what_exporters_do_and_back(heads: int) -> None:
    rows = np.random.default_rng(heads).standard_normal((heads * 6, 5)).astype(np.float32)
    assert np.array_equal(to_split_half(adjacent_rows(rows, heads), heads), rows)
    assert np.array_equal(to_adjacent(rows, heads), adjacent_rows(rows, heads))


def test_scores_agree_after_the_map_and_differ_before() -> None:
    """q and k rotated in adjacent pairs give the scores of the mapped q and k rotated in split-half pairs."""
    generator = np.random.default_rng(0)
    q, k = generator.standard_normal((2, 8))
    angles = 10000.0 ** (-np.arange(4) / 4)

    def adjacent(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(-1)

    def split_half(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        turned = (x[:4] + 1j * x[4:]) * np.exp(1j * position * angles)
        return np.concatenate([turned.real, turned.imag])

    want = adjacent(q, 7) @ adjacent(k, 3)
    mapped_q, mapped_k = (np.asarray(to_split_half(x, 1), np.float64) for x in (q, k))
    assert split_half(mapped_q, 7) @ split_half(mapped_k, 3) == pytest.approx(want, abs=1e-12)
    assert abs(split_half(q, 7) @ split_half(k, 3) - want) > 0.1


def paired_layers(heads: int, kv_heads: int, head_dim: int, layers: int = 4) -> list[tuple[Rows, Rows]]:
    """Q and K whose rows couple inside split-half pairs, as training leaves them."""
    generator = np.random.default_rng(5)
    half, made = head_dim // 2, []
    for _ in range(layers):
        base = generator.standard_normal((kv_heads, half, 96))
        k = generator.standard_normal((kv_heads, head_dim, 96)) + np.concatenate([base, base], axis=1)
        q = generator.standard_normal((kv_heads, head_dim, 96)) + np.concatenate([base, base], axis=1)
        q = q.repeat(heads // kv_heads, axis=0)
        made.append((q.reshape(-1, 96).astype(np.float32), k.reshape(-1, 96).astype(np.float32)))
    return made


def test_weights_that_couple_within_pairs_are_confirmed_or_contradicted() -> None:
    layers = paired_layers(6, 2, 32)
    assert detect_pairing(layers, 6, 2, 32, "split_half").verdict == "confirmed"
    assert detect_pairing(layers, 6, 2, 32, "adjacent").verdict == "contradicted"
    turned = [(adjacent_rows(q, 6), adjacent_rows(k, 2)) for q, k in layers]
    assert detect_pairing(turned, 6, 2, 32, "adjacent").verdict == "confirmed"


def test_only_q_converted_or_random_weights_are_undetermined() -> None:
    layers = [(adjacent_rows(q, 6), k) for q, k in paired_layers(6, 2, 32)]
    assert detect_pairing(layers, 6, 2, 32, "split_half").verdict == "undetermined"
    generator = np.random.default_rng(0)
    noise = [tuple(generator.standard_normal((rows, 96)).astype(np.float32) for rows in (192, 64)) for _ in range(4)]
    assert detect_pairing([(q, k) for q, k in noise], 6, 2, 32, "split_half").verdict == "undetermined"
