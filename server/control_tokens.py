"""Keeps text that a user typed apart from the control tokens that a chat template wrote.

Knows strings, not models. Before rendering, `shield` breaks every control string inside the user's text with a random
marker; after rendering, `alias` renames what is still whole (the template's own) to names nobody can guess, and takes
the marker out again, so that the user's text is tokenised exactly as typed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

PRIVATE_USE = range(0x100000, 0x10FFFE)


def new_marker() -> str:
    """128 random bits in private-use characters: untouched by templates, json and trimming, and not to be guessed."""
    return "".join(chr(PRIVATE_USE[secrets.randbelow(len(PRIVATE_USE))]) for _ in range(8))


class ControlTokens:
    """The control strings of one tokenizer, and a secret alias of each."""

    def __init__(self, strings: Sequence[str]) -> None:
        longest_first = sorted(strings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = tuple({text[:cut] for text in strings for cut in range(1, len(text))})
        self._endings = tuple({text[cut:] for text in strings for cut in range(1, len(text))})
        self.aliases = {text: new_marker() for text in strings}

    def shield(self, value: Any, marker: str) -> Any:
        """The same JSON value with the marker wherever its text holds, begins or ends like a control string."""
        if isinstance(value, str):
            return self._shield_text(value, marker)
        if isinstance(value, list):
            return [self.shield(item, marker) for item in value]
        if isinstance(value, dict):
            return {self.shield(key, marker): self.shield(item, marker) for key, item in value.items()}
        return value

    def _shield_text(self, text: str, marker: str) -> str:
        text = self._pattern.sub(lambda match: match[0][0] + marker + match[0][1:], text)
        body = text.strip()
        # Two pieces that a template joins must not make a whole one: mark the seams, inside the white space around.
        if body.endswith(self._beginnings):
            text = text.rstrip() + marker + text[len(text.rstrip()) :]
        if body.startswith(self._endings):
            text = text[: len(text) - len(text.lstrip())] + marker + text.lstrip()
        return text

    def alias(self, rendered: str, marker: str) -> str:
        """What the tokenizer reads: aliases where the template wrote control tokens, the user's text as typed."""
        return self._pattern.sub(lambda match: self.aliases[match[0]], rendered).replace(marker, "")
