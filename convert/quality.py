"""What quantised weights cost: perplexity, KL and greedy agreement against bf16 on a text that lies beside this file.

Knows nothing of conversion. GGUF's q8_0 of the same matrices is measured beside it, since a speed against q8_0 is fair
only at a like cost. Legend: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from convert.errors import ConvertError
from model.batch import Batch
from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.cpu.build import UnavailableError, find_library
from model.ops.cpu.native import CpuOps
from model.ops.interface import PackedLinear
from model.ops.scaled_linear import CODES, ScaledLinear
from model.weights import load_decoder

TEXT = Path(__file__).parent / "quality_text.txt"
WINDOW, SLICE, PAGE_SIZE = 512, 128, 64
"""Tokens that are read from position 0 on; of those, with logits in memory at a time; tokens of a page."""
Q8_0_RUN = 32
"""Weights of a row that share a scale in GGUF's q8_0."""
FAIR = 2.0
"""A speed against q8_0 counts while our KL is at most this many times q8_0's."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one kind of weights over the tokens that have a successor. kl: mean KL(bf16 || this), nats."""

    weights: str
    tokens: int
    perplexity: float
    kl: float
    same_greedy: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """bf16, the quantised weights, and q8_0 if it can hold these weights."""

    base: Quality
    own: Quality
    q8_0: Quality | None

    @property
    def kl_over_q8_0(self) -> float | None:
        if self.q8_0 is None:
            return None
        return self.own.kl / self.q8_0.kl if self.q8_0.kl > 0 else math.inf

    def lines(self) -> list[str]:
        """A table and its meaning, for people."""
        title = f"over {self.base.tokens} tokens"
        lines = [f"{title:<22} {'perplexity':>10} {'KL to bf16':>12} {'same greedy':>12}"]
        for row in filter(None, (self.base, self.own, self.q8_0)):
            lines.append(f"{row.weights:<22} {row.perplexity:10.3f} {row.kl:12.2e} {row.same_greedy:12.1%}")
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
        ratio = self.kl_over_q8_0
        if ratio is None:
            return f"q8_0 cannot be compared: it takes rows of whole runs of {Q8_0_RUN} weights, this model has others"
        verdict = "counts" if ratio <= FAIR else "does not count"
        reason = f"KL is {ratio:.2f} times q8_0's (at most {FAIR:g})"
        return f"a speed of {self.own.weights} against q8_0 {verdict}: {reason}"

    def as_json(self) -> dict[str, Any]:
        """As --json prints it."""
        return {**asdict(self), "kl_over_q8_0": self.kl_over_q8_0}


class ScaledOps(CpuOps):
    """Rounds and multiplies as a GPU does with fp8; the rest is native."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear:
        if quantization in CODES:
            return ScaledLinear.pack(weight, bias, quantization)
        return super().pack_linear(weight, bias, quantization)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(packed, ScaledLinear):
            return packed(x, out_dtype or x.dtype)
        return super().linear(x, packed, out_dtype)


class OddWidthError(Exception):
    """These weights have no q8_0 form."""


class YardstickOps(CpuOps):
    """Rounds as q8_0 does whatever is to be quantised, layers and head, and computes with it in fp32."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear:
        return super().pack_linear(weight if quantization is None else rounded_to_q8_0(weight), bias)


def rounded_to_q8_0(weight: Tensor) -> Tensor:
    """[N, K] -> f32 [N, K]: runs of a row become whole numbers to 127 times an fp16 scale. Raises OddWidthError."""
    if weight.shape[1] % Q8_0_RUN:
        raise OddWidthError
    blocks = weight.float().reshape(-1, Q8_0_RUN)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp(min=1e-30)).round()
    return (codes * scale.half().float()).view(weight.shape)


def measure_quality(folder: Path, quantization: str) -> Comparison:
    """Three forwards over the text, on the CPU. Raises ConvertError where it cannot be measured."""
    windows = windows_of(folder)
    try:
        ops = CpuOps(find_library())
        own = _load(folder, ScaledOps(find_library()) if quantization == "fp8" else ops, quantization)
    except (UnavailableError, ValueError) as error:
        raise ConvertError(f"the cost of {quantization} cannot be measured: {error}", folder) from error
    base, yardstick = _load(folder, ops, None), _load_yardstick(folder)
    decoders = {"bf16": base, quantization: own} | ({} if yardstick is None else {"q8_0": yardstick})
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in decoders}
    for ids in windows:
        for expected, logits in _side_by_side(ids, list(decoders.values())):
            for name, rows in zip(sums, logits, strict=True):
                sums[name] += _summed(logits[0], rows, expected)
    found = {name: _quality(name, total, len(windows) * (WINDOW - 1)) for name, total in sums.items()}
    return Comparison(found["bf16"], found[quantization], found.get("q8_0"))


def _load_yardstick(folder: Path) -> Decoder | None:
    try:
        return _load(folder, YardstickOps(find_library()), "q8_0")
    except OddWidthError:
        return None


def windows_of(folder: Path) -> list[list[int]]:
    """The text as whole windows of token ids."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConvertError("has no tokenizer.json: quality is measured on text", folder)
    ids = Tokenizer.from_file(str(path)).encode(TEXT.read_text(encoding="utf-8")).ids
    return [list(ids[start : start + WINDOW]) for start in range(0, len(ids) - WINDOW + 1, WINDOW)]


def _load(folder: Path, ops: CpuOps, quantization: str | None) -> Decoder:
    return load_decoder(folder, load_config(folder), ops, "cpu", torch.bfloat16, quantization, max_positions=WINDOW)


def _side_by_side(ids: list[int], models: list[Decoder]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The next tokens [T], and the logits [T, V] f32 of each model, a slice at a time."""
    hidden = [hidden_states(model, ids) for model in models]
    for start in range(0, WINDOW - 1, SLICE):
        end = min(start + SLICE, WINDOW - 1)
        rows = [model.logits(states[start:end]) for model, states in zip(models, hidden, strict=True)]
        yield torch.tensor(ids[start + 1 : end + 1]), rows


def hidden_states(model: Decoder, ids: list[int]) -> Tensor:
    """[T, D] of one sequence from position 0 on."""
    count = len(ids)
    layout = layout_for(model.config, PAGE_SIZE, "bfloat16")
    pages = layout.pages_for(count)
    cache = KVCache(layout, (pages + 1,) * len(layout.groups), "cpu")
    positions, table = torch.arange(count), torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0)
    groups = len(layout.groups)
    batch = Batch(
        token_ids=torch.tensor(ids), positions=positions, slots=(positions + PAGE_SIZE,) * groups,
        page_table=(table,) * groups, kv_lens=torch.tensor([count], dtype=torch.int32),
        q_starts=torch.tensor([0, count], dtype=torch.int32), logits_rows=positions, max_q=count, max_kv=count,
    )  # fmt: skip
    return model.hidden(batch, cache)


def _summed(base: Tensor, own: Tensor, expected: Tensor) -> Tensor:
    """Of some rows: negative log-likelihood, KL and equal first choices, [3] f64."""
    p, q = base.double().log_softmax(-1), own.double().log_softmax(-1)
    nll = -q.gather(1, expected.unsqueeze(1)).sum()
    kl = (p.exp() * (p - q)).sum()
    return torch.stack((nll, kl, (base.argmax(-1) == own.argmax(-1)).double().sum()))


def _quality(name: str, sums: Tensor, tokens: int) -> Quality:
    nll, kl, same = (sums / tokens).tolist()
    return Quality(name, tokens, math.exp(nll), kl, same)
