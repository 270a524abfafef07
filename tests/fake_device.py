"""A runner without a model: it keeps what a KV cache would keep, and notices when a sequence reads somebody else's.

The "KV" of a token is a hash of everything before it; sampling checks every slot that the sequence may still see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from model.kv_cost import KVGroup, KVLayout
from server.engine.core import Engine
from server.engine.facts import EngineInfo
from server.engine.messages import Row, SamplingParams, StepOutput, Submit, TokenLogprob
from server.engine.page_tables import PageTables
from server.engine.plan import PlanRow, RowResult, SampledToken, StepPlan
from server.engine.request import Sequence
from server.engine.scheduler import Limits, Scheduler

VOCAB = 50
EOS = 0


def fold(state: int, token: int) -> int:
    return int.from_bytes(blake2b(f"{state},{token}".encode(), digest_size=6).digest(), "big")


@dataclass
class LateStep:
    """The tokens are there, but core may not see them before collect."""

    results: list[RowResult]

    def collect(self) -> list[RowResult]:
        return self.results


class FakeDevice:
    """fault(row) -> an error text, "nan", or None, decides which rows go wrong."""

    def __init__(self, tables: PageTables, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.tables = tables
        self.slots: list[dict[int, int]] = [{} for _ in tables.pools]
        self.fault: Callable[[PlanRow], str | None] = lambda row: None
        self.plans: list[list[tuple[str, int, int, int]]] = []
        self._on_device: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> LateStep:
        self.plans.append([(r.sequence.request.id, r.sequence.choice, r.start, r.end) for r in plan.rows])
        page = self.tables.page_size
        for slots, copies in zip(self.slots, plan.copies, strict=True):
            held = {(a, b, i): slots.get(a * page + i) for a, b in copies for i in range(page)}
            slots.update({b * page + i: value for (_, b, i), value in held.items() if value is not None})
        faults = [self.fault(row) for row in plan.rows]
        states = [
            self._write(row) if fault in (None, "nan") else 0 for row, fault in zip(plan.rows, faults, strict=True)
        ]
        self._on_device = {}
        return LateStep([self._result(*item) for item in zip(plan.rows, states, faults, strict=True)])

    def _token(self, sequence: Sequence, position: int) -> int:
        tokens = sequence.tokens
        return tokens[position] if position < len(tokens) else self._on_device[id(sequence)]

    def _write(self, row: PlanRow) -> int:
        """Write the row's KV; returns the state after its last token, read back through the page tables."""
        sequence = row.sequence
        state = 0
        for position in range(row.end):
            state = fold(state, self._token(sequence, position))
            for group, window in enumerate(self.tables.windows):
                slot = self._slot(sequence, group, position)
                if position >= row.start:
                    assert slot >= self.tables.page_size, "a token has no page"
                    self.slots[group][slot] = state
                elif window is None or position > row.start - window:
                    assert self.slots[group].get(slot) == state, f"{sequence.request.id} reads foreign KV"
        return state

    def _slot(self, sequence: Sequence, group: int, position: int) -> int:
        page, offset = divmod(position, self.tables.page_size)
        return sequence.pages[group][page] * self.tables.page_size + offset

    def _result(self, row: PlanRow, state: int, fault: str | None) -> RowResult:
        if fault and fault != "nan":
            return RowResult(error=fault)
        tokens = []
        for sequence in row.samples:
            index = sequence.num_output + sequence.num_in_flight - 1
            token = fold(state, fold(sequence.choice, index + sequence.request.params.seed)) % VOCAB
            self._on_device[id(sequence)] = token
            tokens.append(SampledToken(token, fault != "nan", scored_token(token)))
        request = row.sequence.request
        scored = row.sequence.tokens[row.start + 1 : min(row.end + 1, request.prompt_len)] if row.scores_prompt else ()
        embedding = (float(state),) if request.kind == "embed" and row.end == request.prompt_len else None
        return RowResult(tokens, list(map(scored_token, scored)), embedding, finite=fault != "nan")


def scored_token(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(token))


def prompt_state(prompt: list[int]) -> int:
    """What the device holds of a prompt; its embedding is this number."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    return state


def expected(prompt: list[int], params: SamplingParams, choice: int = 0, limit: int = 1 << 30) -> list[int]:
    """What the fake model says for a request that has the machine to itself."""
    state, output = prompt_state(prompt), list[int]()
    while True:
        token = fold(state, fold(choice, len(output) + params.seed)) % VOCAB
        output.append(token)
        at_limit = len(output) >= params.max_tokens or len(prompt) + len(output) >= limit
        if token in params.stop_token_ids or at_limit:
            return output
        state = fold(state, token)


FULL = KVGroup((0,), None, 2, 8, "float32")


def windowed(window: int) -> KVGroup:
    return KVGroup((1,), window, 1, 8, "float32")


@dataclass
class Rig:
    engine: Engine
    device: FakeDevice
    now: list[int]

    def submit(self, request_id: str, prompt: list[int], **fields: object) -> SamplingParams:
        of_submit = [name for name in ("tenant", "priority", "cache_salt", "kind", "grammar") if name in fields]
        submit_fields = {name: fields.pop(name) for name in of_submit}
        fields.setdefault("max_tokens", 8)
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        self.engine.add(Submit(request_id, Submit.pack(prompt), params, **submit_fields))  # type: ignore[arg-type]
        return params

    def step(self) -> StepOutput:
        self.now[0] += 7
        output = self.engine.step()
        self.engine.check_integrity()
        return output

    def run(self, max_steps: int = 10_000) -> list[Row]:
        rows: list[Row] = []
        for _ in range(max_steps):
            if not self.engine.has_work:
                return rows
            rows += self.step().rows
        raise AssertionError(f"still busy after {max_steps} steps")


def rig(
    pages: int | tuple[int, ...] = 32,
    groups: tuple[KVGroup, ...] = (FULL,),
    page_size: int = 4,
    max_model_len: int = 1 << 20,
    max_num_seqs: int = 8,
    budget: int = 16,
    prefix_caching: bool = True,
    overlaps: bool = False,
    **limits: int,
) -> Rig:
    """An engine on the fake device; `pages` leaves out the scratch page."""
    counts = pages if isinstance(pages, tuple) else (pages,) * len(groups)
    layout = KVLayout(page_size, groups)
    tables = PageTables(layout, tuple(count + 1 for count in counts), budget, prefix_caching)
    length = min(max_model_len, tables.capacity())
    scheduler = Scheduler(Limits(length, max_num_seqs, budget, **limits), tables)
    device = FakeDevice(tables, overlaps)
    now = [0]
    return Rig(Engine(scheduler, device, info(length), clock=lambda: now[0]), device, now)


def info(max_model_len: int, vocab_size: int = VOCAB) -> EngineInfo:
    return EngineInfo(
        vocab_size=vocab_size, max_model_len=max_model_len, device="fake", dtype="float32", kv_dtype="float32",
        backend="fake", threads=1, batch_invariant=True, page_size=4, num_pages=(), page_bytes=(),
        kv_bytes_predicted=0, kv_bytes_allocated=0, kv_bytes_resident=0, weights_bytes=0, workspace_bytes=0,
        rss_bytes=0, max_num_seqs=0, max_num_batched_tokens=0, prefix_caching=True, pid=0,
    )  # fmt: skip


def outputs(rows: list[Row]) -> dict[tuple[str, int], list[int]]:
    """The tokens of every choice, in the order in which they were reported."""
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        found.setdefault((row.id, row.choice), []).extend(row.tokens)
    return found


def finishes(rows: list[Row]) -> dict[tuple[str, int], str]:
    return {(row.id, row.choice): row.finish for row in rows if row.finish}
