"""The live line of a run, on standard error.

Knows figures, not requests. On a terminal the line is rewritten twice a second; elsewhere one is printed every ten.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from server.loadtest.drive import Target
from server.loadtest.measure import Figures


@dataclass(slots=True)
class Progress:
    title: str
    expected: int | None
    target: Target
    figures: Figures

    async def show(self) -> None:
        """Until cancelled; then the line is wiped."""
        live = sys.stderr.isatty()
        try:
            while True:
                await asyncio.sleep(0.5 if live else 10.0)
                print(
                    f"\r\x1b[K{self.line()}" if live else self.line(),
                    end="" if live else "\n",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            if live:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def line(self) -> str:
        figures = self.figures
        done = f"{figures.sent}/{self.expected}" if self.expected else str(figures.sent)
        rate = figures.tokens["output"] / figures.seconds if figures.seconds else 0.0
        ttft = f", TTFT mean {figures.latencies['ttft'].mean() * 1000:.0f} ms" if figures.ok else ""
        return (
            f"{self.title}: {done} done, {self.target.in_flight} in flight, {figures.errors.total()} failed, "
            f"{rate:.0f} tokens/s{ttft}"
        )
