"""Bytes as people write them.

Knows no settings.
"""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512MiB", "1e9"-free plain numbers or "1.5GB"; ValueError names what was given."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size (examples: 2GiB, 512MiB, 1000000)")
    return int(float(match[1]) * UNITS[match[2]])
