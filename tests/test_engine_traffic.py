"""The engine under random traffic with faults: its books are checked at every step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from server.engine.messages import Abort, Row, SamplingParams
from server.engine.plan import PlanRow
from tests.fake_device import FULL, VOCAB, Rig, expected, finishes, outputs, rig, windowed

PROMPTS = st.builds(
    lambda shared, own: [(i * 7) % VOCAB for i in range(shared)] + own,
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 20),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(0, VOCAB, 9))]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "x"]),
    }
)


class Traffic(RuleBasedStateMachine):
    """Submit, abort, step and fail in any order, on pools that are too small for what is asked of them."""

    checked_steps = 0
    """Steps of all runs together after which the books were checked."""

    @initialize(
        pages=st.integers(6, 24),
        groups=st.sampled_from([(FULL,), (FULL, windowed(6)), (windowed(5),)]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        prefix_caching=st.booleans(),
        overlaps=st.booleans(),
    )
    def start(self, **setup: object) -> None:
        self.rig: Rig = rig(**setup)  # type: ignore[arg-type]
        self.rig.device.fault = self.fault
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}
        self.rows: list[Row] = []
        self.broken: dict[str, str] = {}
        self.billed = 0

    def fault(self, row: PlanRow) -> str | None:
        return self.broken.get(row.sequence.request.id)

    @rule(prompt=PROMPTS, fields=PARAMS)
    def submit(self, prompt: list[int], fields: dict[str, object]) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = prompt, self.rig.submit(name, prompt, **dict(fields))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), also=st.integers(0, 1000))
    def abort(self, which: int, also: int) -> None:
        names = list(self.sent)
        self.rig.engine.abort(Abort((names[which % len(names)], names[also % len(names)])))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), kind=st.sampled_from(["nan", "out of memory"]))
    def break_one(self, which: int, kind: str) -> None:
        self.broken[list(self.sent)[which % len(self.sent)]] = kind

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rows += self.rig.step().rows  # checks the books
            type(self).checked_steps += 1

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rows += self.rig.run()
        self.everyone_got_an_end()
        self.everyone_got_their_own_tokens()
        self.nothing_is_left()

    def everyone_got_an_end(self) -> None:
        ends = finishes(self.rows)
        for name, (_, params) in self.sent.items():
            refused = ends.get((name, 0)) == "error" and (name, 1) not in ends
            assert refused or all((name, choice) in ends for choice in range(params.n)), name
        last = {(row.id, row.choice): index for index, row in enumerate(self.rows)}
        assert all(self.rows[index].finish for index in last.values()), "a row came after the end"

    def everyone_got_their_own_tokens(self) -> None:
        limit, ends = self.rig.engine.scheduler.limits.max_model_len, finishes(self.rows)
        for (name, choice), tokens in outputs(self.rows).items():
            prompt, params = self.sent[name]
            if len(prompt) + (params.max_tokens > 0) > limit:
                assert ends[name, choice] == "error"
                continue
            whole = expected(prompt, params, choice, limit) if params.max_tokens else []
            assert tokens == whole[: len(tokens)], name
            assert ends[name, choice] in ("abort", "error") or tokens == whole

    def nothing_is_left(self) -> None:
        pools = self.rig.engine.tables.pools
        assert not any(pool.num_active for pool in pools)
        assert not self.rig.engine.scheduler.running and not self.rig.engine.scheduler.waiting
        paid = sum(row.usage.kv_byte_ns for row in self.rows if row.usage)
        assert paid == sum(pool.page_bytes * pool.ledger.active_ns for pool in pools)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_ten_thousand_steps_of_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    long, before = settings(max_examples=200, stateful_step_count=60, deadline=None), Traffic.checked_steps
    run_state_machine_as_test(Traffic, settings=long)
    steps = Traffic.checked_steps - before
    with capsys.disabled():
        print(f"\n{steps} engine steps of random traffic, the books checked after each")
    assert steps >= 10_000
