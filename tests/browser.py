"""Debian's Chromium, headless: a page that keeps what a good page never does.

Knows nothing of what is tested. Chromium is never downloaded: it is $CHROMIUM, or what PATH has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"]


def find_chromium() -> str | None:
    given = os.environ.get("CHROMIUM")
    return given or next((path for path in map(shutil.which, NAMES) if path), None)


@dataclass
class Visit:
    """A page of one origin. faults: console errors (policy violations are some), exceptions, foreign requests."""

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self.origin + "/"):
            self.faults.append(f"foreign request: {request.url}")

    def faults_but(self, *expected: str) -> list[str]:
        return [fault for fault in self.faults if not any(text in fault for text in expected)]

    def open(self) -> Visit:
        self.page.goto(self.origin)
        return self

    def open_live(self) -> Visit:
        """Open, and wait for the stream."""
        self.open().page.wait_for_selector("#connection[data-state=live]")
        return self

    def text(self, selector: str) -> str:
        shown: str = self.page.inner_text(selector)
        return shown

    def screenshot(self, name: str) -> None:
        """Kept for eyes where SCREENSHOTS names a folder."""
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@contextmanager
def chromium() -> Iterator[Browser]:
    path = find_chromium()
    assert path is not None, "no Chromium: install Debian's chromium package or set CHROMIUM to its path"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, origin: str, **context: Any) -> Iterator[Visit]:
    """A page with a fresh profile. context: Playwright's options (viewport, color_scheme, ...)."""
    profile = browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | context)
    try:
        yield Visit(profile.new_page(), origin)
    finally:
        profile.close()
