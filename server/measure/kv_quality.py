"""What 8-bit caches cost in quality: python -m server.measure.kv_quality [MODEL].

Knows no text: the model samples its own (temperature 1, from its first token), then every cache dtype scores the same
tokens, and logits are compared position by position with those of the plain cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.batch import Batch
from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import DTYPE_BYTES, layout_for
from model.ops.select import ops_for
from model.weights import load_decoder
from server.engine.cores import usable_cores
from server.engine.facts import EngineConfig
from server.engine.messages import SamplingParams, Submit
from server.engine.startup import build_engine
from server.measure.engine import demo_model, model_folder

TEXTS, LENGTH = 4, 256
PAGE_SIZE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Quality:
    """How far the logits of one cache dtype are from those of the plain cache, over all positions of all texts."""

    dtype: str
    token_bytes: int
    largest: float
    mean: float
    divergence: float  # mean KL(plain || this), nats
    agreement: float  # share of positions with the same greedy token

    def line(self) -> str:
        return (
            f"{self.dtype:15}{self.token_bytes:>11,}{self.largest:>12.3f}{self.mean:>10.4f}{self.divergence:>12.6f}"
            f"{self.agreement:>11.2%}"
        )


def sampled_texts(folder: Path) -> list[list[int]]:
    """Token ids of what the model says by itself, seeds 0 to TEXTS - 1."""
    config = EngineConfig(str(folder), device="cpu", kv_cache_memory=320 << 20, threads=torch.get_num_threads())
    engine, first = build_engine(config), load_config(folder).bos_token_id or 0
    texts = {str(seed): [first] for seed in range(TEXTS)}
    for name in texts:
        params = SamplingParams(max_tokens=LENGTH - 1, temperature=1.0, seed=int(name))
        engine.add(Submit(name, Submit.pack([first]), params))
    while engine.has_work:
        for row in engine.step().rows:
            texts[row.id] += row.tokens
    return list(texts.values())


def logits_of(decoder: Decoder, text: list[int], kv_dtype: str) -> Tensor:
    """f32 [len(text), V], of one forward: a quantised cache is read as it was written, also by its own chunk."""
    layout, count = layout_for(decoder.config, PAGE_SIZE, kv_dtype), len(text)
    pages = layout.pages_for(count)
    cache = KVCache(layout, (pages + 1,) * len(layout.groups), CPU)
    position = torch.arange(count)
    table = torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0)
    groups, starts = len(layout.groups), torch.tensor([0, count], dtype=torch.int32)
    batch = Batch(
        torch.tensor(text), position, (position + PAGE_SIZE,) * groups, (table,) * groups, starts[1:], starts, position,
        count, count,
    )  # fmt: skip
    return decoder.forward(batch, cache)


def compare(decoder: Decoder, texts: list[list[int]], plain: str) -> Iterator[Quality]:
    """Every cache dtype but the plain one, which is the dtype of the activations."""
    expected = [logits_of(decoder, text, plain) for text in texts]
    for dtype in (name for name in DTYPE_BYTES if name != plain):
        pairs = [(logits_of(decoder, text, dtype), logits) for text, logits in zip(texts, expected, strict=True)]
        off = [(found - wanted).abs() for found, wanted in pairs]
        token_bytes = layout_for(decoder.config, PAGE_SIZE, dtype).token_bytes
        yield Quality(
            dtype,
            token_bytes,
            max(part.max().item() for part in off),
            sum(part.mean().item() for part in off) / len(off),
            sum(divergence(wanted, found) for found, wanted in pairs) / len(pairs),
            sum((found.argmax(1) == wanted.argmax(1)).float().mean().item() for found, wanted in pairs) / len(pairs),
        )


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Mean KL divergence in nats of rows of logits [R, V]."""
    p, q = wanted.log_softmax(1), found.log_softmax(1)
    return (p.exp() * (p - q)).sum(1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m server.measure.kv_quality", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", nargs="?", type=model_folder, help="a canonical folder; the demo model if left out")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of activations")
    parser.add_argument("--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.model or demo_model()
    texts = sampled_texts(folder)
    decoder = load_decoder(folder, load_config(folder), ops_for(CPU), CPU, getattr(torch, args.dtype))
    print(f"{TEXTS} texts of {LENGTH} tokens, activations and plain cache in {args.dtype}")
    print(f"{'cache':15}{'bytes/token':>11}{'largest':>12}{'mean':>10}{'KL':>12}{'same token':>11}")
    for quality in compare(decoder, texts, args.dtype):
        print(quality.line(), flush=True)


if __name__ == "__main__":
    main()
