"""The whole decoder: against transformers, against itself in every cut of the work, and without any device mixed up."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.batch import Batch
from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.reference import ReferenceOps
from model.weights import load_decoder

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_9_3_tied": (
        "Llama",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_mixed_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
}


def save_model(kind: str, folder: Path) -> Any:
    """A tiny random model of transformers, saved; returns it in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        family, overrides = KINDS[kind]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**BASE, **overrides})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # they start at 0 and 1, which hides mistakes
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, load_config(folder), ReferenceOps(), "cpu", dtype)


class Session:
    """A cache and the sequences in it: feeds tokens to the decoder the way a scheduler would."""

    def __init__(self, decoder: Decoder, page_size: int = 4, num_pages: int = 200) -> None:
        self.decoder = decoder
        self.layout = layout_for(decoder.config, page_size, str(decoder.embedding.dtype).removeprefix("torch."))
        self.kv = KVCache(self.layout, (num_pages,) * len(self.layout.groups), "cpu")
        for storage in self.kv.storages:
            storage.fill_(math.nan)  # whatever leaks from a slot that was never written shows
        self.pages: dict[str, list[int]] = {}
        self.lens: dict[str, int] = {}
        self.free = list(range(num_pages - 1, 0, -1))

    def feed(self, work: dict[str, list[int]]) -> dict[str, Tensor]:
        """work: tokens to append to each named sequence, in one forward; all their logits."""
        for name, tokens in work.items():
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.layout.page_size < self.lens.get(name, 0) + len(tokens):
                pages.append(self.free.pop())
        batch = self.batch(work)
        logits = self.decoder.forward(batch, self.kv)
        for name, tokens in work.items():
            self.lens[name] = self.lens.get(name, 0) + len(tokens)
        starts = batch.q_starts.tolist()
        return {name: logits[a:b] for name, (a, b) in zip(work, itertools.pairwise(starts), strict=True)}

    def batch(self, work: dict[str, list[int]]) -> Batch:
        size = self.layout.page_size
        positions, slots, kv_lens, starts = [], [], [], [0]
        for name, tokens in work.items():
            first = self.lens.get(name, 0)
            span = range(first, first + len(tokens))
            positions += list(span)
            slots += [self.pages[name][p // size] * size + p % size for p in span]
            kv_lens.append(first + len(tokens))
            starts.append(starts[-1] + len(tokens))
        width = max(len(self.pages[name]) for name in work)
        table = torch.tensor([self.pages[n] + [0] * (width - len(self.pages[n])) for n in work], dtype=torch.int32)
        groups = len(self.layout.groups)
        return Batch(
            token_ids=torch.tensor([t for tokens in work.values() for t in tokens]),
            positions=torch.tensor(positions),
            slots=(torch.tensor(slots),) * groups,
            page_table=(table,) * groups,
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            q_starts=torch.tensor(starts, dtype=torch.int32),
            logits_rows=torch.arange(starts[-1]),
            max_q=max(len(tokens) for tokens in work.values()),
            max_kv=max(kv_lens),
        )


def some_tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, (count,), generator=generator).tolist()


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = save_model(kind, tmp_path), some_tokens(150)
    logits = Session(load(tmp_path)).feed({"a": tokens})["a"]
    assert logits.dtype == torch.float32
    assert (logits - reference_logits(model, tokens)).abs().max() < 1e-4
