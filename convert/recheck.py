"""`ropeway verify`: a finished folder checked again, by the hashes in its report and by proof; and its source.

Knows nothing of how anything is proven (verify.py) or hashed (changes.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from convert.canonical import is_huggingface
from convert.changes import changed_config, changed_tensors, changed_texts, compare_source, different_values
from convert.detect import open_source
from convert.errors import ConvertError
from convert.formats.huggingface import open_huggingface
from convert.json_file import read_json
from convert.plan import Target, make_plan
from convert.report import REPORT_FILE
from convert.source import Source
from convert.verify import Proof, prove


class Verification(NamedTuple):
    """problems: what is not as it was, a line each. notes: what could not be compared. reported: there is a report."""

    proof: Proof
    problems: list[str]
    notes: list[str]
    reported: bool

    @property
    def refusal(self) -> str | None:
        """Why this folder must not be used, or None."""
        return self.proof.refusal() or next(iter(self.problems), None)


def verify_folder(folder: Path, against: Path | None) -> Verification:
    """Recheck a folder, and its source where one is named. Raises ConvertError for what the server would not load."""
    targets, report = make_plan(_open(folder)), _report_of(folder)
    problems, notes = _held_to_report(folder, targets, report)
    if not (folder / "tokenizer.json").is_file():
        notes.append("tokenizer: there is none, and no proof by text")
    source = None if against is None else open_source(against)
    proof = prove(folder, source, report is None or bool(report["lossless"]))
    if source is None:
        notes.append("source and logits: not compared (name the source with --against)")
    elif report is not None:
        changed, note = compare_source(source, report)
        problems, notes = problems + changed, [*notes, note]
    elif proof.refusal():
        problems += different_values(targets, source)
    return Verification(proof, problems, notes, report is not None)


def _open(folder: Path) -> Source:
    if not is_huggingface(folder):
        text = "is not a model folder (config.json and safetensors): name the folder that `ropeway convert` made"
        raise ConvertError(text if folder.exists() else "no such folder", folder)
    return open_huggingface(folder)


def _report_of(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None


def _held_to_report(folder: Path, targets: list[Target], report: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """Problems and notes. Tensors are read without a report too: NaN is found so."""
    problems = changed_tensors(targets, report)
    if report is None:
        return problems, [f"hashes: not compared (no {REPORT_FILE})"]
    return problems + changed_config(folder, report) + changed_texts(folder, report), []
