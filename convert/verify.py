"""Proof that a folder is the model it was made from: RoPE pairing read from weights, logits against the source.

Knows nothing of how the conversion was done: it opens both sides through their own readings. One tensor in memory at a
time on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from convert.dtypes import Float32
from convert.errors import ConvertError
from convert.formats.huggingface import open_huggingface
from convert.forward import OnLayer, logits
from convert.json_file import read_json
from convert.positions import RotationComparison, WindowComparison, compare_rotation, compare_windows
from convert.readings import TensorReading, source_reading
from convert.rope_pairing import Pairing, PairingEvidence, Verdict, detect_pairing
from convert.source import Source

PROBE_TEXT = (
    "Once upon a time there was a little girl named Lily. She loved to play in the park with her mom. One day, she saw "
    "a big dog. The dog was very happy, and Lily wanted to play with the dog."
)
PROBE_TOKENS = 32
FORWARDS = 3  # of the result, of the result in the other pairing, of the source
PAIRING_LAYERS = 8
CLEAR_NATS = 0.5
EXACT, ROUNDED = 1e-3, 2e-2  # largest logit difference (relative to the largest logit); mean KL in nats after rounding


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Source against result on the same tokens. kl: mean over positions of KL(source || result), nats."""

    tokens: int
    max_difference: float
    at_token: int
    largest_logit: float
    kl: float
    same_choice: float
    lossless: bool
    passed: bool

    def line(self) -> str:
        """The comparison in one line, for people."""
        return (
            f"{'agree' if self.passed else 'DISAGREE'} over {self.tokens} tokens: max difference "
            f"{self.max_difference:.2e} (largest logit {self.largest_logit:.1f}, at token {self.at_token}), "
            f"mean KL {self.kl:.2e} nats, same first choice {100 * self.same_choice:.0f} %"
        )


@dataclass(frozen=True, slots=True)
class TextEvidence:
    """How well the result predicts English with its pairing and with the other one (nats a token)."""

    tokens: int
    nll: float
    other_nll: float
    verdict: Verdict

    def line(self) -> str:
        """The evidence in one line, for people."""
        other = f"with the other pairing {self.other_nll:.2f}"
        return f"{self.verdict} ({self.nll:.2f} nats a token over {self.tokens}; {other})"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked. A part that had nothing to check against is None."""

    source_pairing: PairingEvidence | None
    result_pairing: PairingEvidence
    text: TextEvidence | None
    rotation: RotationComparison | None
    windows: WindowComparison | None
    logits: LogitComparison | None

    def refusal(self) -> str | None:
        """Why this conversion must not be used, or None."""
        for side, pairing in (("source", self.source_pairing), ("result", self.result_pairing)):
            if pairing is not None and pairing.verdict == "contradicted":
                return f"RoPE pairing of the {side} is {pairing.line()}"
        if self.text is not None and self.text.verdict == "contradicted":
            return f"RoPE pairing by text is {self.text.line()}"
        if self.rotation is not None and not self.rotation.passed:
            return f"rotary frequencies of source and result {self.rotation.line()}"
        if self.windows is not None and not self.windows.passed:
            return f"sliding windows of source and result {self.windows.line()}"
        if self.logits is not None and not self.logits.passed:
            return f"logits of source and result {self.logits.line()}"
        return None

    def lines(self) -> list[str]:
        """One line for each part of the proof, for people."""
        pairs = [("source", self.source_pairing), ("result", self.result_pairing)]
        lines = [f"RoPE pairing of the {side}: {evidence.line()}" for side, evidence in pairs if evidence is not None]
        lines += [f"RoPE pairing by text: {self.text.line()}"] if self.text else []
        lines += [f"rotary frequencies of source and result: {self.rotation.line()}"] if self.rotation else []
        lines += [f"sliding windows of source and result: {self.windows.line()}"] if self.windows else []
        return lines + ([f"logits of source and result: {self.logits.line()}"] if self.logits else [])

    def as_json(self) -> dict[str, Any]:
        """The proof as conversion_report.json keeps it."""
        return {"summary": self.lines(), **asdict(self)}


def prove(folder: Path, source: Source | None, lossless: bool, on_layer: OnLayer = lambda: None) -> Proof:
    """Check `folder`, and compare it with `source` where there is one. Does not raise on a bad verdict: see refusal.

    on_layer is called after each layer of each forward, of which there are at most FORWARDS.
    """
    with np.errstate(all="ignore"):  # absurd weights give inf and NaN: the comparison reports them
        return _prove(folder, source, lossless, on_layer)


def _prove(folder: Path, source: Source | None, lossless: bool, on_layer: OnLayer) -> Proof:
    result = source_reading(open_huggingface(folder))
    ids, is_text = probe_ids(folder)
    ours = logits(result, ids, on_layer)
    text = text_evidence(result, ours, ids, on_layer) if is_text else None
    if source is None:
        return Proof(None, pairing_of(result), text, None, None, None)
    _require_same_sizes(folder, source)
    original = source_reading(source)
    comparison = compare_logits(logits(original, ids, on_layer), ours, lossless)
    rotation, windows = compare_rotation(original, result), compare_windows(original, result)
    return Proof(pairing_of(original), pairing_of(result), text, rotation, windows, comparison)


def _require_same_sizes(folder: Path, source: Source) -> None:
    ours, theirs = read_json(folder / "config.json"), source.values()
    for key in ("num_hidden_layers", "vocab_size"):
        if ours[key] != theirs[key]:
            raise ConvertError(
                f"{key} is {ours[key]}, and {theirs[key]} in {source.path}: that is another model", folder
            )


def text_evidence(result: TensorReading, ours: Float32, ids: list[int], on_layer: OnLayer) -> TextEvidence:
    """The dynamic test: rotated in the wrong pairs, a trained model predicts text clearly worse.

    Says nothing of a model that knows no text, or of a probe of a few tokens.
    """
    other = logits(replace(result, adjacent=not result.adjacent), ids, on_layer)
    nll, other_nll = _nll(ours, ids), _nll(other, ids)
    verdict: Verdict = "undetermined"
    knows_text = min(nll, other_nll) + CLEAR_NATS < math.log(ours.shape[-1])  # better than any token alike
    if knows_text and len(ids) >= PROBE_TOKENS // 2 and abs(nll - other_nll) > CLEAR_NATS:
        verdict = "confirmed" if nll < other_nll else "contradicted"
    return TextEvidence(len(ids) - 1, nll, other_nll, verdict)


def _nll(scores: Float32, ids: list[int]) -> float:
    return -float(_log_softmax(scores)[np.arange(len(ids) - 1), ids[1:]].mean())


def pairing_of(reading: TensorReading) -> PairingEvidence:
    """The static test on up to eight layers, spread over the depth."""
    dims = reading.dimensions
    first, last = min(1, dims.layers - 1), dims.layers - 1  # layer 0 says little
    chosen = np.unique(np.linspace(first, last, min(PAIRING_LAYERS, dims.layers)).astype(int))
    expected: Pairing = "adjacent" if reading.adjacent else "split_half"
    width = 2 * len(dims.inverse_frequencies)
    return detect_pairing(_folded(reading, chosen.tolist()), dims.heads, dims.kv_heads, width, expected)


def _folded(reading: TensorReading, layers: list[int]) -> Iterator[tuple[Float32, Float32]]:
    for layer in layers:
        norm = reading.weight("attn_norm", layer)[None, :]
        yield reading.weight("q", layer) * norm, reading.weight("k", layer) * norm


def probe_ids(folder: Path) -> tuple[list[int], bool]:
    """A fixed English text through the folder's tokenizer, True; without one, fixed random ids, False."""
    path = folder / "tokenizer.json"
    vocabulary = read_json(folder / "config.json")["vocab_size"]
    if path.is_file():
        ids = _tokenizer(path).encode(PROBE_TEXT).ids[:PROBE_TOKENS]
        if len(ids) > 1 and max(ids) < vocabulary:
            return list(ids), True
    return [int(i) for i in np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)], False


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"not a tokenizer: {error}", path) from error


def compare(original: TensorReading, result: TensorReading, ids: list[int], lossless: bool) -> LogitComparison:
    """Both forwards on the same ids."""
    return compare_logits(logits(original, ids), logits(result, ids), lossless)


def compare_logits(theirs: Float32, ours: Float32, lossless: bool) -> LogitComparison:
    """Logits of the source and of the result, [T, V]. Lossless means that only the order of additions may differ."""
    tokens = len(theirs)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return LogitComparison(tokens, math.inf, 0, math.inf, math.inf, 0.0, lossless, passed=False)
    difference = np.abs(ours - theirs).max(-1)
    p, q = _log_softmax(theirs), _log_softmax(ours)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    largest, worst = float(np.abs(theirs).max()), float(difference.max())
    passed = worst <= EXACT * max(1.0, largest) if lossless else kl <= ROUNDED
    same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    return LogitComparison(tokens, worst, int(difference.argmax()), largest, kl, same, lossless, passed)


def _log_softmax(x: Float32) -> Float32:
    shifted = (x - x.max(-1, keepdims=True)).astype(np.float64)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), np.float64)


def require(proof: Proof, path: Path) -> None:
    """Raises ConvertError when the proof says that the result is wrong."""
    if (refusal := proof.refusal()) is not None:
        raise ConvertError(f"conversion refused: {refusal}", path)
