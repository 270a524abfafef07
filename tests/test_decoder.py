"""The whole decoder: against transformers, against itself in every cut of the work, and without any device mixed up."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.1, 2.0, 6.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_9_3_tied": (
        "Llama",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_attention_bias": ("Llama", {"attention_bias": True}),
    "llama_mlp_bias": ("Llama", {"mlp_bias": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama_longrope": (
        "Llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}, "head_dim": 6},
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3_window_tied": ("Phi3", {"pad_token_id": 0, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi3_partial": ("Phi3", {"pad_token_id": 0, "rope_parameters": PARTIAL}),
    "phi3_longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2_mixed_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_bias": ("Qwen3", {"head_dim": 12, "attention_bias": True}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def save_model(kind: str, folder: Path, **more: Any) -> Any:
    """A tiny random model of transformers, saved; returns it in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        family, overrides = KINDS[kind]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**BASE, **overrides, **more})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # they start at 0 and 1, which hides mistakes
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, max_positions: int | None = None) -> Decoder:
    return load_decoder(folder, load_config(folder), ReferenceOps(), "cpu", dtype, max_positions=max_positions)


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


@pytest.mark.parametrize("kind", ["llama_9_3_tied", "qwen2_mixed_windows", "qwen3"])
def test_every_cut_of_the_work_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Whole, token by token, in chunks; alone and mixed with others; any page size."""
    save_model(kind, tmp_path)
    decoder, tokens = load(tmp_path), some_tokens(140)
    whole = Session(decoder).feed({"a": tokens})["a"]
    steps = Session(decoder, page_size=16)
    assert torch.equal(torch.cat([steps.feed({"a": [token]})["a"] for token in tokens]), whole)
    for chunk in (3, 64, 65):
        mixed = Session(decoder)
        mixed.feed({"c": some_tokens(70, seed=3)})
        parts = []
        for start in range(0, len(tokens), chunk):
            work = {"b": some_tokens(1 + start % 5, seed=start), "a": tokens[start : start + chunk], "c": [start % 96]}
            parts.append(mixed.feed(work)["a"])
        assert torch.equal(torch.cat(parts), whole)


def test_a_batch_of_mixed_lengths_gives_each_what_it_gets_alone(tmp_path: Path) -> None:
    save_model("mistral", tmp_path)
    decoder = load(tmp_path)
    prompts = {name: some_tokens(count, seed=count) for name, count in zip("abcde", (1, 5, 64, 67, 130), strict=True)}
    together, alone = Session(decoder), Session(decoder)
    apart: dict[str, Tensor] = {}
    for name, prompt in prompts.items():
        apart |= alone.feed({name: prompt})
    for name, logits in together.feed(prompts).items():
        assert torch.equal(logits, apart[name])
    for step in range(3):
        decoded = together.feed({name: [step] for name in prompts})  # all decode at once
        for name in prompts:
            assert torch.equal(decoded[name], alone.feed({name: [step]})[name])


def test_incremental_decoding_is_close_to_one_forward_of_transformers(tmp_path: Path) -> None:
    model, tokens = save_model("llama", tmp_path), some_tokens(70)
    steps = Session(load(tmp_path))
    logits = torch.cat([steps.feed({"a": [token]})["a"] for token in tokens])
    assert (logits - reference_logits(model, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causality_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    decoder, tokens = load(tmp_path, dtype), some_tokens(16)
    changed = [*tokens[:8], (tokens[8] + 1) % 96, *tokens[9:]]
    before, after = (Session(decoder).feed({"a": prompt})["a"] for prompt in (tokens, changed))
    assert torch.equal(before[:8], after[:8])
    assert not torch.equal(before[8:], after[8:])


def test_half_precision_stays_close_and_keeps_its_bits(tmp_path: Path) -> None:
    model, tokens = save_model("qwen3", tmp_path), some_tokens(90)
    decoder = load(tmp_path, torch.bfloat16)
    whole = Session(decoder).feed({"a": tokens})["a"]
    assert whole.dtype == torch.float32
    assert (whole - reference_logits(model, tokens)).abs().max() < 0.1
    steps = Session(decoder)
    assert torch.equal(torch.cat([steps.feed({"a": [token]})["a"] for token in tokens]), whole)


def test_a_fresh_model_knows_nothing(tmp_path: Path) -> None:
    """The loss of small random weights is that of a guess: ln(V)."""
    save_model("llama", tmp_path)
    tokens = some_tokens(200)
    logits = Session(load(tmp_path)).feed({"a": tokens})["a"]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    assert abs(loss.item() - math.log(96)) < 0.1


def test_poison_in_one_sequence_stays_in_it(tmp_path: Path) -> None:
    """Token 7's embedding is NaN: who reads it gets NaN, its batch and the next user of its pages do not."""
    save_model("llama", tmp_path)
    decoder = load(tmp_path)
    decoder.embedding[7] = math.nan
    good, bad = [1, 2, 3, 4, 5], [1, 2, 7]
    session = Session(decoder)
    logits = session.feed({"good": good, "bad": bad})
    assert torch.equal(logits["good"], Session(decoder).feed({"good": good})["good"])
    assert logits["bad"][2].isnan().all()
    session.free += session.pages.pop("bad")
    session.lens.pop("bad")
    assert torch.equal(session.feed({"next": good})["next"], logits["good"])


def test_logits_only_for_the_rows_asked(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    session, tokens = Session(load(tmp_path)), some_tokens(12)
    whole = session.feed({"a": tokens})["a"]
    session.lens["a"] = 0
    some = replace(session.batch({"a": tokens}), logits_rows=torch.tensor([11, 3]))
    assert torch.equal(session.decoder.forward(some, session.kv), whole[[11, 3]])


def test_weights_nbytes_counts_every_parameter_once(tmp_path: Path) -> None:
    model = save_model("llama_9_3_tied", tmp_path)
    decoder = load(tmp_path, torch.bfloat16)
    assert decoder.weights_nbytes == 2 * sum(parameter.numel() for parameter in model.parameters())


def move(value: Any, device: str) -> Any:
    """A structure of dataclasses, tuples and tensors with its tensors on another device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, tuple):
        return tuple(move(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = [item.name for item in fields(value) if item.init]
        return replace(value, **{name: move(getattr(value, name), device) for name in parts})
    return value


@pytest.mark.parametrize("work", [{"a": 9}, {"a": 1, "b": 1, "c": 1}], ids=["prefill", "decode"])
def test_a_forward_never_leaves_the_device_of_its_inputs(work: dict[str, int], tmp_path: Path) -> None:
    """On fake tensors a mixed operation raises. Without CUDA torch can only fake the device called meta."""
    save_model("mistral", tmp_path)
    session = Session(load(tmp_path, torch.bfloat16))
    session.feed({name: some_tokens(count) for name, count in work.items()})
    session.lens = dict.fromkeys(work, 0)
    batch = session.batch({name: some_tokens(count) for name, count in work.items()})
    device = "cuda" if torch.cuda.is_available() else "meta"
    with FakeTensorMode(allow_non_fake_inputs=False):
        kv = KVCache(session.layout, session.kv.num_pages, device)
        logits = move(session.decoder, device).forward(move(batch, device), kv)
    assert logits.device.type == device
    assert logits.shape == (sum(work.values()), 96)
