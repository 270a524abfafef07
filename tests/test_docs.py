"""README and docs against the repository: every file they point to is there, and every page can be found.

Knows nothing of what the pages say; tables made from options are held to them where the options are tested.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
CODE_PATH = re.compile(r"`((?:server|model|convert|tests|docker|docs)/[\w./-]*\w/?)`")
COMMAND = re.compile(r"^\s*(?:make|`make) ([a-z][a-z-]*)", re.MULTILINE)


def local_links(page: Path) -> set[Path]:
    """What the page links to inside the repository."""
    return {(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if "://" not in link}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_exists(page: Path) -> None:
    named = {REPOSITORY / path for path in CODE_PATH.findall(page.read_text())}
    assert [str(path) for path in sorted(local_links(page) | named) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(COMMAND.findall(page.read_text())) <= targets


def test_the_readme_leads_to_every_page() -> None:
    found, more = {README}, {README}
    while more := {link for page in more for link in local_links(page) if link.suffix == ".md"} - found:
        found |= more
    assert [page.name for page in PAGES if page not in found] == []
