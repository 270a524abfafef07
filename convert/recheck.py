"""`ropeway verify`: a finished folder checked again, by the hashes in its report and by proof; and its source.

Knows nothing of how anything is proven (verify.py) or hashed (changes.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from convert.canonical import is_huggingface
from convert.changes import changed_config, changed_tensors, changed_texts, compare_source, different_values
from convert.detect import open_source
from convert.errors import ConvertError
from convert.formats.huggingface import open_huggingface
from convert.json_file import read_json
from convert.plan import make_plan
from convert.report import REPORT_FILE
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
    if not is_huggingface(folder):
        text = "is not a model folder (config.json and safetensors): name the folder that `ropeway convert` made"
        raise ConvertError(text if folder.exists() else "no such folder", folder)
    targets = make_plan(open_huggingface(folder))
    report = read_json(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None
    problems, notes = changed_tensors(targets, report), [] if report else [f"hashes: not compared (no {REPORT_FILE})"]
    if report is not None:
        problems += changed_config(folder, report) + changed_texts(folder, report)
    if not (folder / "tokenizer.json").is_file():
        notes.append("tokenizer: there is none, and no proof by text")
    if against is None:
        notes.append("source and logits: not compared (name the source with --against)")
    source = None if against is None else open_source(against)
    proof = prove(folder, source, report is None or bool(report["lossless"]))
    if source is not None and report is not None:
        changed, note = compare_source(source, report)
        problems, notes = problems + changed, [*notes, note]
    elif source is not None and proof.refusal():
        problems += different_values(targets, source)
    return Verification(proof, problems, notes, report is not None)
