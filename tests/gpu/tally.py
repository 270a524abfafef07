"""The errors of a section, case by case; a case that raises has that for its error, and hides no other.

Knows no cases.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

MOST = 300
"""Characters of an exception that are kept."""


def told(error: BaseException) -> str:
    """What it is, and what it comes from: Triton's own show source, and leave the reason to their cause."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return _line(error) if root is error else f"{_line(error)}; from {_line(root)}"


def _line(error: BaseException) -> str:
    """Both ends of a long one: libraries begin with the reason, compilers end with it."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= MOST else f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"


def print_whole(name: str, error: BaseException) -> None:
    """The traceback on stderr, in one piece, as others write beside it."""
    sys.stderr.write(f"{name}: {''.join(traceback.format_exception(error))}")
    sys.stderr.flush()


class Tally:
    """Errors up to `bound` are right. name: of the section, before the traceback of a case that raises."""

    def __init__(self, name: str, bound: float) -> None:
        self._name = name
        self._bound = bound
        self._errors: dict[str, float] = {}
        self._raised: dict[str, str] = {}

    def add(self, case: str, measure: Callable[[], Mapping[str, float]]) -> None:
        """measure tells the errors of what it compares, by name."""
        try:
            self._errors |= {f"{case}: {name}": error for name, error in measure().items()}
        except Exception as error:
            self._raised[case] = told(error)
            print_whole(f"{self._name}, {case}", error)

    def verdict(self) -> dict[str, Any]:
        """The worst figure, and everything that is wrong. Failed if a case raised: that may have spoiled the device."""
        wrong = self._raised | {case: error for case, error in self._errors.items() if not error <= self._bound}
        figures: dict[str, Any] = {"cases": len(self._errors) + len(self._raised), "bound": self._bound}
        if self._errors:
            worst = max(self._errors, key=lambda case: self._errors[case])
            figures |= {"error": self._errors[worst], "worst": worst}
        status = "failed" if self._raised else "wrong" if wrong else "ok"
        return {"status": status, **figures} | ({"wrong": wrong} if wrong else {})
