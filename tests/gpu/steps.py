"""One decode step by hand, over recorded graphs: no scheduler, no requests.

Knows no goals.
"""

from __future__ import annotations

import numpy as np
import torch

from server.engine.decode_graphs import DecodeGraphs
from server.engine.decode_inputs import PAD_NARROW, PAD_REAL, PAD_WIDE, DecodeRows
from tests.gpu.models import Rig, config_of, random_decoder
from tests.gpu.visit import Visit


def rig_of(
    visit: Visit,
    name: str,
    tokens: int,
    max_num_seqs: int,
    max_len: int,
    quantization: str | None = None,
    batch_invariant: bool = False,
) -> Rig:
    shape = "toy" if visit.tiny else name
    decoder = random_decoder(config_of(shape), visit.ops(batch_invariant), visit.device, visit.dtype, quantization)
    return Rig.of(visit, decoder, tokens, max_num_seqs, max_len)


def decode_rows(rig: Rig, rows: int, kv_len: int) -> DecodeRows:
    """Greedy sequences of kv_len tokens on pages of their own, in a random order."""
    pages = rig.layout.pages_for(kv_len)
    table = (np.random.default_rng(0).permutation(rows * pages) + 1).astype(np.int32).reshape(rows, pages)
    wide, real, narrow = PAD_WIDE.repeat(rows, 1), PAD_REAL.repeat(rows, 1), PAD_NARROW.repeat(rows, 1)
    wide[0], narrow[0] = np.arange(rows) % rig.decoder.config.vocab_size, kv_len
    return DecodeRows(wide, real, narrow, [table] * len(rig.layout.groups))


def decode_seconds(rig: Rig, graphs: DecodeGraphs, rows: int, kv_len: int) -> float:
    """Seconds of one recorded step, inputs and sampling included, many in a row."""
    inputs, size = decode_rows(rig, rows, kv_len), graphs.size_for(rows)
    assert size is not None

    def step() -> None:
        graphs.forward(inputs, size)
        graphs.sample_plain(rows, size)

    with torch.inference_mode():
        return rig.visit.seconds(step, 2 if rig.visit.tiny else 40)


def step_bytes(rig: Rig, kv_tokens: int) -> int:
    """What a step must read at least: weights once, every key and value of its sequences once."""
    return rig.weights_read + kv_tokens * rig.layout.token_bytes
