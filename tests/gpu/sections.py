"""All sections by name, and the child that works some of them off.

Knows neither lanes nor files.
"""

from __future__ import annotations

import time
import traceback
from multiprocessing.connection import Connection

from tests.gpu.checks import CHECKS
from tests.gpu.tally import told
from tests.gpu.timings import TIMINGS
from tests.gpu.visit import Visit

SECTIONS = CHECKS | TIMINGS


def run_sections(device: str, tiny: bool, pipe: Connection, names: list[str]) -> None:
    """Run sections until one raises: that may have spoiled this process."""
    visit = Visit.of(device, tiny)
    for name in names:
        pipe.send(None)
        started = time.monotonic()
        try:
            found = {"status": "ok"} | SECTIONS[name](visit)
        except Exception as error:
            traceback.print_exc()
            pipe.send({"status": "failed", "reason": told(error)})
            return
        pipe.send(found | {"seconds": round(time.monotonic() - started, 1)})
        visit.clean_up()
