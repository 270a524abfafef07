"""The one error of this package: a source that cannot be converted faithfully.

Knows nothing of formats or of the command line, which prints it as one line and exits 1.
"""

from __future__ import annotations

from pathlib import Path

LONGEST = 600  # characters: names in hostile files can be megabytes


class ConvertError(Exception):
    """One line: which file, at which byte where there is one, what is wrong and what to do."""

    def __init__(self, text: str, path: Path | None = None, offset: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if offset is None else f"{path} at byte {offset}: "
        line = "".join(char if char.isprintable() else " " for char in where + text)
        super().__init__(line if len(line) <= LONGEST else line[: LONGEST - 3] + "...")
