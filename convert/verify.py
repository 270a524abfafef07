"""Proof that a folder is the model it was made from: hashes, RoPE pairing read from weights, logits against the source.

Knows nothing of how the conversion was done: it opens both sides through their own readings. One tensor in memory at a
time on either side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from convert.dtypes import Float32, raw_bytes
from convert.errors import ConvertError
from convert.formats.huggingface import open_huggingface, read_json
from convert.forward import logits
from convert.readings import TensorReading, source_reading
from convert.report import REPORT_FILE
from convert.rope_pairing import Pairing, PairingEvidence, detect_pairing
from convert.source import Source, open_source

PROBE_TEXT = (
    "The lighthouse keeper wrote in his book every evening: wind from the west, three ships, one light. When the storm "
    "came in 1911 he wrote nothing at all, and the next page begins with the word “calm”."
)
PROBE_TOKENS = 48
PAIRING_LAYERS = 8
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
        return (
            f"{'agree' if self.passed else 'DISAGREE'} over {self.tokens} tokens: max difference "
            f"{self.max_difference:.2e} (largest logit {self.largest_logit:.1f}, at token {self.at_token}), "
            f"mean KL {self.kl:.2e} nats, same first choice {100 * self.same_choice:.0f} %"
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked. A part that had nothing to check against is None."""

    source_pairing: PairingEvidence | None
    result_pairing: PairingEvidence
    logits: LogitComparison | None

    def refusal(self) -> str | None:
        """Why this conversion must not be used, or None."""
        for side, pairing in (("source", self.source_pairing), ("result", self.result_pairing)):
            if pairing is not None and pairing.verdict == "contradicted":
                return f"RoPE pairing of the {side} is {pairing.line()}"
        if self.logits is not None and not self.logits.passed:
            return f"logits of source and result {self.logits.line()}"
        return None

    def lines(self) -> list[str]:
        pairs = [("source", self.source_pairing), ("result", self.result_pairing)]
        lines = [f"RoPE pairing of the {side}: {evidence.line()}" for side, evidence in pairs if evidence is not None]
        return lines + ([f"logits of source and result: {self.logits.line()}"] if self.logits else [])

    def as_json(self) -> dict[str, Any]:
        return {"summary": self.lines(), **asdict(self)}


def prove(folder: Path, source: Source | None, lossless: bool) -> Proof:
    """Check `folder`, and compare it with `source` where there is one. Does not raise on a bad verdict: see refusal."""
    result = source_reading(open_huggingface(folder))
    if source is None:
        return Proof(None, pairing_of(result), None)
    original = source_reading(source)
    comparison = compare(original, result, probe_ids(folder), lossless)
    return Proof(pairing_of(original), pairing_of(result), comparison)


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


def probe_ids(folder: Path) -> list[int]:
    """A fixed English text through the folder's tokenizer; without one, fixed random ids."""
    path = folder / "tokenizer.json"
    if path.is_file():
        ids = Tokenizer.from_file(str(path)).encode(PROBE_TEXT).ids[:PROBE_TOKENS]
        if len(ids) > 1:
            return list(ids)
    vocabulary = read_json(folder / "config.json")["vocab_size"]
    return [int(i) for i in np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)]


def compare(original: TensorReading, result: TensorReading, ids: list[int], lossless: bool) -> LogitComparison:
    """Both forwards on the same ids. Lossless means that only the order of additions may differ."""
    ours, theirs = logits(result, ids), logits(original, ids)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return LogitComparison(len(ids), math.inf, 0, math.inf, math.inf, 0.0, lossless, passed=False)
    difference = np.abs(ours - theirs).max(-1)
    p, q = _log_softmax(theirs), _log_softmax(ours)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    largest, worst = float(np.abs(theirs).max()), float(difference.max())
    passed = worst <= EXACT * max(1.0, largest) if lossless else kl <= ROUNDED
    same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    return LogitComparison(len(ids), worst, int(difference.argmax()), largest, kl, same, lossless, passed)


def _log_softmax(x: Float32) -> Float32:
    shifted = (x - x.max(-1, keepdims=True)).astype(np.float64)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), np.float64)


def verify_folder(folder: Path, against: Path | None) -> tuple[Proof, list[str]]:
    """Recheck a converted folder. Returns the proof and what is wrong with the files (hashes, missing tensors)."""
    report = read_json(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None
    problems = [] if report is None else changed_tensors(folder, report)
    lossless = report is None or bool(report["lossless"])
    source = None if against is None else open_source(against)
    return prove(folder, source, lossless), problems


def changed_tensors(folder: Path, report: dict[str, Any]) -> list[str]:
    """Tensors whose bytes are not those that the conversion wrote."""
    table = open_huggingface(folder).table
    problems = []
    for row in report["tensors"]:
        tensor = table.get(row["target"])
        if tensor is None:
            problems.append(f"{row['target']} is missing")
        elif hashlib.sha256(raw_bytes(tensor.read())).hexdigest() != row["sha256"]:
            problems.append(f"{row['target']} in {tensor.path.name} differs from what was written")
    return problems


def require(proof: Proof, path: Path) -> None:
    """Raises ConvertError when the proof says that the result is wrong."""
    if (refusal := proof.refusal()) is not None:
        raise ConvertError(f"conversion refused: {refusal}", path)
