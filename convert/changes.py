"""Which tensors are no longer what they were when a folder was made: its own, and those of its source.

Knows nothing of logits or pairings: it compares hashes with the report, and values where there is no report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import cast, raw_bytes
from convert.json_file import read_json
from convert.plan import Target, make_plan
from convert.report import hash_texts
from convert.source import Source
from convert.source_hashes import hash_source

CONFIG = "config.json"
OF_THE_RESULT = {"dtype", "torch_dtype"}
"""Keys that say how the tensors were written, whatever the source said."""


def changed_tensors(targets: Sequence[Target], report: Mapping[str, Any] | None) -> list[str]:
    """Tensors of a folder whose bytes are not those that the conversion wrote, a line each.

    All of them are read, with or without a report. Raises ConvertError for NaN and inf.
    """
    then = {} if report is None else {row["target"]: row["sha256"] for row in report["tensors"]}
    problems = []
    for target in targets:
        digest = hashlib.sha256(raw_bytes(target.read())).hexdigest()
        if then.pop(target.name, digest) != digest:
            problems.append(f"{target.name} in {target.source.path.name} differs from what was written")
    return problems + [f"{name} is missing" for name in then]


def changed_config(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Keys of config.json that are not those that the report accounts for, a line each."""
    now, then = read_json(folder / CONFIG), {key: row["value"] for key, row in report["config"].items()}
    different = [key for key, value in then.items() if now.get(key) != value and key not in OF_THE_RESULT]
    problems = [f"{CONFIG}: {key} is {now.get(key)!r}, {then[key]!r} was written" for key in different]
    added = sorted(now.keys() - then.keys() - OF_THE_RESULT)
    return problems + [f"{CONFIG}: {key} was not there when the folder was made" for key in added]


def changed_texts(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """The tokenizer's files and the like that are not those that were written, a line each."""
    now = hash_texts(folder)
    problems = []
    for name, digest in report.get("texts", {}).items():
        if now.get(name) != digest:
            problems.append(f"{name} {'differs from what was written' if name in now else 'is missing'}")
    return problems


def compare_source(source: Source, report: Mapping[str, Any]) -> tuple[list[str], str]:
    """Tensors of the source that are not those that were converted, a line each; and one line about the comparison."""
    then, made_from = report["source"].get("tensors"), report["source"]["format"]
    if then is None:
        return [], "source tensors: not compared by hash (the report is of a version that kept none)"
    if made_from != source.format:
        return [], f"source tensors: not compared by hash (made from {made_from}, this is {source.format})"
    changed = _changed(source, then)
    return changed, f"source tensors: {len(then)} were converted, {len(changed) or 'none'} of them changed since"


def _changed(source: Source, then: Mapping[str, Any]) -> list[str]:
    now = hash_source(source).tensors
    problems = [f"source tensor {name} is missing" for name in then if name not in now]
    for name, row in now.items():
        place = source.table[name].path.name
        if name not in then:
            problems.append(f"source tensor {name} in {place} was not there when the folder was made")
        elif row != then[name]:
            problems.append(f"source tensor {name} in {place} differs from the one that was converted")
    return problems


def different_values(targets: Sequence[Target], source: Source) -> list[str]:
    """Tensors of a folder without a report that are not what a conversion of the source gives, a line each."""
    table = {target.name: target for target in targets}
    problems = []
    for wanted in make_plan(source):
        target = table.get(wanted.name)
        if target is None:
            problems.append(f"{wanted.name} is missing")
        elif not np.array_equal(target.read(), cast(wanted.read(), wanted.dtype, target.dtype)):
            problems.append(f"{target.name} in {target.source.path.name} differs from what the source gives")
    return problems
