"""Sections worked off in child processes, lanes of them side by side: one that dies or hangs costs no other.

Knows no section. A child is given names; it sends None as it begins a section, and what it found as it ends one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

Found = dict[str, Any]
Work = Callable[[Connection, list[str]], None]
START = 120.0
"""Seconds in which a child begins a section: before the first it imports torch."""
END = 10.0
"""Seconds in which a process that has closed its pipe is gone."""


@dataclass(frozen=True)
class Bounds:
    """deadline: of time.monotonic(), when everything ends. longest: seconds that one section may take."""

    deadline: float
    longest: float


class Lane:
    """Sections one after another, in as many processes as it takes."""

    def __init__(self, names: list[str], work: Work, bounds: Bounds, report: Callable[[str, Found], None]) -> None:
        """work runs in the children, report here, once a name."""
        self.left = list(names)
        self._work = work
        self._bounds = bounds
        self._report = report
        self._process: SpawnProcess | None = None

    def start(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=in_a_group, args=(self._work, theirs, self.left))
        self._process.start()
        theirs.close()
        self._expect("start", START)

    def _expect(self, event: str, seconds: float) -> None:
        self._awaited = event
        self._since = time.monotonic()
        self.due = min(self._since + seconds, self._bounds.deadline)

    @property
    def _spent(self) -> float:
        """Seconds that the section has taken, or that its process has not begun it for."""
        return round(time.monotonic() - self._since, 1)

    def hear(self) -> None:
        """Something came through the pipe, if only its end."""
        assert self._process is not None
        try:
            found = self.pipe.recv()
        except EOFError:
            self._process.join(END)
            self._lose(f"exit code {self._process.exitcode}: see above")
            return
        if found is None:
            self._expect("answer", self._bounds.longest)
            return
        self._report(self.left.pop(0), found)
        self._expect("start", START)
        if found["status"] == "failed" or not self.left:  # an error of a device spoils the process
            self._go_on()

    def give_up(self) -> None:
        """Nothing came in time."""
        if time.monotonic() < self._bounds.deadline:
            self._lose(f"no {self._awaited} in {self._spent:.0f} s")
            return
        if self._awaited == "answer":
            cut_off = {"status": "skipped", "reason": "out of time while it ran", "seconds": self._spent}
            self._report(self.left.pop(0), cut_off)
        for name in self.left:
            self._report(name, {"status": "skipped", "reason": "out of time"})
        self.left = []

    def _lose(self, reason: str) -> None:
        self._report(self.left.pop(0), {"status": "failed", "reason": reason, "seconds": self._spent})
        self._go_on()

    def _go_on(self) -> None:
        self.end()
        if self.left:
            self.start()

    def end(self) -> None:
        """The process, if there is one, and those that it started, are gone."""
        if self._process is None or self._process.pid is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may have no group yet
        self._process.join()
        self._process = None
        self.pipe.close()


def in_a_group(work: Work, pipe: Connection, names: list[str]) -> None:
    """A child that leads a group of processes, so that what it starts ends with it; a crash says where it was."""
    os.setsid()
    faulthandler.enable()
    work(pipe, names)


def work_off(lanes: list[Lane]) -> None:
    """Every section of every lane is reported when this returns; no process is left, however it ends."""
    try:
        for lane in lanes:
            lane.start()
        while going := [lane for lane in lanes if lane.left]:
            soonest = min(lane.due for lane in going) - time.monotonic()
            heard = wait([lane.pipe for lane in going], max(0.0, soonest))
            for lane in going:
                if lane.pipe in heard:
                    lane.hear()
                elif time.monotonic() >= lane.due:
                    lane.give_up()
    finally:
        for lane in lanes:
            lane.end()
