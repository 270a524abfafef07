"""All sections by name, and the child that works some of them off.

Knows neither lanes nor files.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu.checks import CHECKS
from tests.gpu.tally import print_whole, told
from tests.gpu.timings import TIMINGS
from tests.gpu.visit import Visit

SECTIONS = CHECKS | TIMINGS


def run_sections(device: str, tiny: bool, pipe: Connection, names: list[str]) -> None:
    """Run sections until one fails: what raised in it may have spoiled this process."""
    visit = Visit.of(device, tiny)
    for name in names:
        pipe.send(None)
        started = time.monotonic()
        found = run_section(name, visit)
        pipe.send(found | {"seconds": round(time.monotonic() - started, 1)})
        if found["status"] == "failed":
            return
        visit.clean_up()


def run_section(name: str, visit: Visit) -> dict[str, Any]:
    try:
        return {"status": "ok"} | SECTIONS[name](visit)
    except Exception as error:
        print_whole(name, error)
        return {"status": "failed", "reason": told(error)}
