"""Which tensors are no longer what they were when a folder was made: its own, and those of its source.

Knows nothing of logits or pairings: it compares hashes with the report, and values where there is no report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.dtypes import cast, raw_bytes
from convert.formats.huggingface import open_huggingface
from convert.plan import make_plan
from convert.source import Source
from convert.source_hashes import hash_source


def changed_tensors(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Tensors of the folder whose bytes are not those that the conversion wrote, a line each."""
    table = open_huggingface(folder).table
    problems = []
    for row in report["tensors"]:
        tensor = table.get(row["target"])
        if tensor is None:
            problems.append(f"{row['target']} is missing")
        elif hashlib.sha256(raw_bytes(tensor.read())).hexdigest() != row["sha256"]:
            problems.append(f"{row['target']} in {tensor.path.name} differs from what was written")
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


def different_values(folder: Path, source: Source) -> list[str]:
    """Tensors of a folder without a report that are not what a conversion of the source gives, a line each."""
    table = open_huggingface(folder).table
    problems = []
    for target in make_plan(source):
        tensor = table.get(target.name)
        if tensor is None:
            problems.append(f"{target.name} is missing")
        elif not np.array_equal(tensor.read(), cast(target.read(), target.dtype, tensor.dtype)):
            problems.append(f"{target.name} in {tensor.path.name} differs from what the source gives")
    return problems
