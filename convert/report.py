"""conversion_report.json: the account of every tensor and config key, and the proof.

Knows nothing of how any of it was computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.plan import Target
from convert.source import Source
from convert.source_hashes import SourceHashes

REPORT_FILE = "conversion_report.json"
CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the same source would give other bytes."""


def make_report(
    source: Source, targets: list[Target], hashes: Mapping[str, str], files: Mapping[str, int],
    texts: Mapping[str, str], proof: dict[str, Any], seconds: Mapping[str, float], source_hashes: SourceHashes,
) -> dict[str, Any]:  # fmt: skip
    """hashes: target name -> sha256 of the written bytes. files: name -> size, to detect a half-copied folder.

    texts: see hash_texts.
    """
    return {
        "converter": {"name": "ropeway", "version": CONVERTER_VERSION},
        "source": {"name": source.path.name, "format": source.format, "architecture": source.architecture,
                   "pairing": source.pairing, "files": source_hashes.files, "tensors": source_hashes.tensors},
        "lossless": is_lossless(targets),
        "tensors": [_row(target, hashes[target.name]) for target in targets],
        "not_used": [{"source": name, "reason": reason} for name, reason in source.dropped.items()],
        "config": {key: {"value": entry.value, "from": entry.origin} for key, entry in source.config.items()},
        "metadata_not_used": source.unused,
        "proof": proof,
        "files": dict(files),
        "texts": dict(texts),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }  # fmt: skip


def hash_texts(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that is neither tensors, nor config.json (which goes key by key), nor the report."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".safetensors"]
    named = [path for path in files if path.name not in (REPORT_FILE, "config.json")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in named}


def is_lossless(targets: Sequence[Target]) -> bool:
    """True when no value was rounded (dequantising to fp32 is exact)."""
    return all(target.dtype == target.source.dtype for target in targets)


def _row(target: Target, digest: str) -> dict[str, Any]:
    row = {
        "source": target.source.name, "stored": target.source.stored, "target": target.name, "dtype": target.dtype,
        "shape": list(target.shape), "transform": target.transform, "sha256": digest,
    }  # fmt: skip
    return row | ({"parts": list(target.source.parts)} if target.source.parts else {})


def table(report: Mapping[str, Any]) -> list[str]:
    """The account in a few lines for the screen: tensors by what was done to them, then the proof."""
    counts: dict[str, int] = {}
    for row in report["tensors"]:
        counts[row["transform"]] = counts.get(row["transform"], 0) + 1
    lines = [f"{count:5} tensors: {transform}" for transform, count in sorted(counts.items())]
    lines += [f"not used: {row['source']} ({row['reason']})" for row in report["not_used"]]
    unknown = [key for key, reason in report["metadata_not_used"].items() if reason.startswith("unknown")]
    lines += [f"unknown metadata, not used: {', '.join(unknown)}"] if unknown else []
    if "tokenizer.json" not in report["texts"]:
        lines.append("no tokenizer in the source, and no proof by text: put a tokenizer.json into the folder")
    return lines + list(report["proof"]["summary"])
