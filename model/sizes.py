"""Bytes as people write them: the one reader of every option that takes a size.

Knows no settings.
"""

from __future__ import annotations

import re

POWERS = " kmgt"
LEAST_PLAIN = 1000  # a smaller number without a unit is one whose unit was forgotten


def parse_size(text: str) -> int:
    """Bytes of "2GiB" (1024**3 each), "1.5GB" (1000**3) or a plain "1000000"; ValueError names what was given."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?))?(b?)\s*", text.lower())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** POWERS.index(match[2] or " ")) if match else 0
    if match is None or size < 1:
        raise ValueError(f"{text!r} is not a size from 1 byte up (examples: 2GiB, 512MB, 1000000)")
    if size < LEAST_PLAIN and not match[2] and not match[4]:
        raise ValueError(f"{text!r} would be {size} bytes: add a unit, as in {match[1]}GiB (or {match[1]}B)")
    return size
