"""Every page of the pool as the HTTP process knows it, folded from the page changes of each step since the start.

Knows neither the engine nor HTTP: whoever looks at the map costs the engine nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.kv_cost import SCRATCH_PAGES
from server.caller import Caller
from server.engine.messages import KvChange, KvEvent

KEPT = -1
"""In the place of a reference count: nobody holds the page, and its content is kept for prompts that begin alike."""
RUN_FIELDS = ("page", "count", "references", "held_by", "hits", "since")
Cells = dict[int, Iterable[int]]
"""Pages by group, ascending."""


@dataclass(slots=True)
class Page:
    """holders: (request id, tenant), one entry a reference. hits: times its content spared a computation.

    since: when it became held, kept or free (whole seconds of the Unix epoch, so that neighbours agree; 0: never used).
    """

    holders: list[tuple[str, str]] = field(default_factory=list)
    is_kept: bool = False
    hits: int = 0
    since: int = 0

    def change(self, event: KvEvent, holder: tuple[str, str], now_s: int) -> None:
        was_held = bool(self.holders)
        if event in ("new", "found"):
            self.hits = self.hits + 1 if event == "found" else 0
            self.holders.append(holder)
        else:
            self.holders.remove(holder)
        self.is_kept = event == "kept"
        if was_held != bool(self.holders):
            self.since = now_s

    @property
    def references(self) -> int:
        return KEPT if self.is_kept else len(self.holders)


class PageMap:
    """num_pages: of each group, the scratch page included; it is not on the map."""

    def __init__(self, num_pages: Sequence[int]) -> None:
        self._groups = [[Page() for _ in range(count)] for count in num_pages]
        self._changed: set[tuple[int, int]] = set()

    def apply(self, changes: Iterable[KvChange], now_s: int) -> None:
        for group, page, event, request_id, tenant in changes:
            self._groups[group][page].change(event, (request_id, tenant), now_s)
            self._changed.add((group, page))

    def take_changed(self) -> Cells:
        """Pages that changed since the last call."""
        changed: dict[int, list[int]] = {}
        for group, page in sorted(self._changed):
            changed.setdefault(group, []).append(page)
        self._changed.clear()
        return dict(changed)

    def everything(self) -> Cells:
        return {group: range(SCRATCH_PAGES, len(pages)) for group, pages in enumerate(self._groups)}

    def show(self, cells: Cells, caller: Caller) -> dict[str, Any]:
        """Runs of neighbours in equal state, RUN_FIELDS each. held_by: index into the list of holders, -1 for none;
        a holder that the caller may not see is null."""
        holders: dict[tuple[str | None, ...], int] = {}
        groups = [{"group": group, "runs": self._runs(group, pages, caller, holders)} for group, pages in cells.items()]
        return {"groups": groups, "held_by": [list(ids) for ids in holders]}

    def _runs(
        self, group: int, pages: Iterable[int], caller: Caller, holders: dict[tuple[str | None, ...], int]
    ) -> list[list[int]]:
        runs: list[list[int]] = []
        for number in pages:
            page = self._groups[group][number]
            ids = tuple(id if caller.sees(tenant) else None for id, tenant in page.holders)
            held_by = holders.setdefault(ids, len(holders)) if ids else -1
            cell = [page.references, held_by, page.hits, page.since]
            if runs and runs[-1][0] + runs[-1][1] == number and runs[-1][2:] == cell:
                runs[-1][1] += 1
            else:
                runs.append([number, 1, *cell])
        return runs
