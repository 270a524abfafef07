"""The table of docs/convert.md, format by architecture, made of the tests that say what they prove.

`python -m tests.proof_table` writes it again. A test says it by the marker proves(format=..., architecture=...), where
{name} stands for a parameter of the test. Knows nothing of what the tests do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "convert.md"
BEGIN, END = "<!-- proofs: made by `python -m tests.proof_table` -->", "<!-- end of proofs -->"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
COLLECT = "--collect-proofs"

Proof = tuple[str, str, str]


class Collector:
    """A pytest plugin: prints format, architecture and test of every marked test, one JSON array a line."""

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Once for each item, parameters filled in."""
        for item in items:
            for mark in item.iter_markers("proves"):
                parameters = (
                    item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
                )
                cell = [str(mark.kwargs[key]).format(**parameters) for key in ("format", "architecture")]
                print(json.dumps([*cell, item.nodeid.partition("[")[0]]))


def collected() -> list[Proof]:
    """Every proof of the suite, in the order of the files."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.proof_table", COLLECT], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return list(dict.fromkeys((row[0], row[1], row[2]) for row in rows))


def table(proofs: Sequence[Proof]) -> str:
    """Markdown: numbers in the cells, and the tests that they stand for."""
    tests = list(dict.fromkeys(test for _, _, test in proofs))
    lines = ["| format | " + " | ".join(ARCHITECTURES) + " |", "|---" * (len(ARCHITECTURES) + 1) + "|"]
    for kind in sorted({kind for kind, _, _ in proofs}, key=str.lower):
        cells = [
            ", ".join(str(1 + tests.index(test)) for a_format, an_architecture, test in proofs
                      if (a_format, an_architecture) == (kind, architecture))
            for architecture in ARCHITECTURES
        ]  # fmt: skip
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    named = [f"{1 + number}. `{test.replace('::', '` ')}" for number, test in enumerate(tests)]
    return "\n".join([BEGIN, *lines, "", *named, END])


def committed() -> str:
    """The table as it stands in the page, markers included."""
    page = PAGE.read_text("utf-8")
    return page[page.index(BEGIN) : page.index(END) + len(END)]


def main(words: Sequence[str]) -> int:
    """Print what pytest collects (for `collected`), or write the page."""
    if COLLECT in words:
        files = sorted(str(path) for path in (REPOSITORY / "tests").glob("test_convert*.py"))
        options = ["--collect-only", "-q", "-s", "-p", "no:cacheprovider"]
        return int(pytest.main([*options, *files], plugins=[Collector()]))
    PAGE.write_text(PAGE.read_text("utf-8").replace(committed(), table(collected())), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
