"""The errors of a section, case by case; a case that raises has that for its error, and hides no other.

Knows no cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST = 300
"""Characters of an exception that are kept."""


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST]


class Tally:
    """Errors up to `bound` are right."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._errors: dict[str, float] = {}
        self._raised: dict[str, str] = {}

    def add(self, case: str, measure: Callable[[], Mapping[str, float]]) -> None:
        """measure tells the errors of what it compares, by name."""
        try:
            self._errors |= {f"{case}: {name}": error for name, error in measure().items()}
        except Exception as error:
            self._raised[case] = told(error)

    def verdict(self) -> dict[str, Any]:
        """The worst figure, and everything that is wrong."""
        wrong = self._raised | {case: error for case, error in self._errors.items() if not error <= self._bound}
        figures: dict[str, Any] = {"cases": len(self._errors) + len(self._raised), "bound": self._bound}
        if self._errors:
            worst = max(self._errors, key=lambda case: self._errors[case])
            figures |= {"error": self._errors[worst], "worst": worst}
        return {"status": "wrong", **figures, "wrong": wrong} if wrong else {"status": "ok", **figures}
