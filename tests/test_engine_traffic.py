"""The engine under random traffic with faults: its books are checked at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

from server.engine.messages import Abort, AbortReason, GrammarSpec, Row, SamplingParams
from server.engine.plan import PlanRow
from tests.fake_device import (
    FULL,
    VOCAB,
    Rig,
    expected,
    finishes,
    outputs,
    prompt_state,
    rig,
    scored_token,
    windowed,
)

PROMPTS = st.builds(
    lambda shared, own: [(i * 7) % VOCAB for i in range(shared)] + own,
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 20),
        "n": st.integers(1, 3),
        "best_of": st.sampled_from([None, None, 4]),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(0, VOCAB, 9))]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)
OF_SUBMIT = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "x"]),
        "grammar": st.sampled_from([None, None, GrammarSpec("count", "4")]),
    }
)
REASONS: list[AbortReason] = ["client", "stop_string", "timeout", "queue_timeout", "slow_reader"]
CANNOT_FOLLOW = 5


class Counting:
    """A grammar of so many tokens, which one token breaks: its matchers and who makes them. No mask is asked for."""

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.error: str | None = None

    def matcher(self, spec: GrammarSpec) -> Counting:
        return Counting(int(spec.text))

    def copy(self) -> Counting:
        return Counting(self.left)

    def accept(self, token: int) -> None:
        self.left -= 1
        self.error = "cannot follow" if token == CANNOT_FOLLOW else None

    @property
    def is_complete(self) -> bool:
        return self.left == 0


@dataclass(frozen=True)
class Asked:
    """What was sent, and what it is owed."""

    prompt: list[int]
    params: SamplingParams
    kind: str
    grammar: GrammarSpec | None

    def owed(self, limit: int) -> list[list[int]]:
        """The tokens of each choice that is reported, best first where they are ranked."""
        params = self.params
        if self.kind == "embed" or not params.max_tokens:
            return [[]] * params.n
        every = [self.one(choice, limit) for choice in range(max(params.n, params.best_of or 0))]
        if len(every) > params.n:
            every.sort(key=lambda tokens: sum(tokens) / max(1, len(tokens)))  # a log-probability is -token
        return every[: params.n]

    def one(self, choice: int, limit: int) -> list[int]:
        whole = expected(self.prompt, self.params, choice, limit)
        if self.grammar is None:
            return whole
        fits = whole[: int(self.grammar.text)]
        return fits[: fits.index(CANNOT_FOLLOW)] if CANNOT_FOLLOW in fits else fits

    def is_refused(self, limit: int) -> bool:
        return len(self.prompt) + (self.kind == "generate" and self.params.max_tokens > 0) > limit


class Traffic(RuleBasedStateMachine):
    """Submit, abort, step and fail in any order, on pools that are too small for what is asked of them."""

    checked_steps = 0
    """Steps of all runs together that computed something; the books were checked after each."""

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
        self.rig.engine.grammars = Counting()  # type: ignore[assignment]
        self.sent: dict[str, Asked] = {}
        self.rows: list[Row] = []
        self.broken: dict[str, str] = {}

    def fault(self, row: PlanRow) -> str | None:
        return self.broken.get(row.sequence.request.id)

    @rule(prompt=PROMPTS, fields=PARAMS, of_submit=OF_SUBMIT)
    def submit(self, prompt: list[int], fields: dict[str, Any], of_submit: dict[str, Any]) -> None:
        name = f"r{len(self.sent)}"
        params = self.rig.submit(name, prompt, **fields, **of_submit)
        self.sent[name] = Asked(prompt, params, "generate", of_submit["grammar"])

    @rule(prompt=PROMPTS)
    def embed(self, prompt: list[int]) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = Asked(prompt, self.rig.submit(name, prompt, kind="embed", max_tokens=1), "embed", None)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), also=st.integers(0, 1000), reason=st.sampled_from(REASONS))
    def abort(self, which: int, also: int, reason: AbortReason) -> None:
        self.rig.engine.abort(Abort((self.name(which), self.name(also)), reason))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), choice=st.integers(0, 4))
    def abort_one_choice(self, which: int, choice: int) -> None:
        self.rig.engine.abort(Abort((), "stop_string", choices=((self.name(which), choice),)))

    def name(self, which: int) -> str:
        return list(self.sent)[which % len(self.sent)]

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), kind=st.sampled_from(["nan", "out of memory"]))
    def break_one(self, which: int, kind: str) -> None:
        self.broken.setdefault(self.name(which), kind)  # what was not written for lack of memory stays so

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            output = self.rig.step()  # checks the books
            self.rows += output.rows
            type(self).checked_steps += output.stats.step_tokens > 0

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
        self.prompts_were_read_for_who_asked()
        self.nothing_is_left()

    def everyone_got_an_end(self) -> None:
        ends = finishes(self.rows)
        for name, asked in self.sent.items():
            refused = ends.get((name, 0)) == "error" and (name, 1) not in ends
            assert refused or all((name, choice) in ends for choice in range(asked.params.n)), name
        last = {(row.id, row.choice): index for index, row in enumerate(self.rows)}
        assert all(self.rows[index].finish for index in last.values()), "a row came after the end"

    def everyone_got_their_own_tokens(self) -> None:
        limit, ends = self.rig.engine.scheduler.limits.max_model_len, finishes(self.rows)
        for (name, choice), tokens in outputs(self.rows).items():
            asked = self.sent[name]
            if asked.is_refused(limit):
                assert ends[name, choice] == "error"
                continue
            whole = asked.owed(limit)[choice]
            assert tokens == whole[: len(tokens)], name
            assert ends[name, choice] in ("abort", "error") or tokens == whole

    def prompts_were_read_for_who_asked(self) -> None:
        """Scores of every token after the first, and embeddings, of who was not ended before."""
        for row in self.rows:
            asked = self.sent[row.id]
            whole = (None, *map(scored_token, asked.prompt[1:]))
            if row.prompt_logprobs is not None:
                assert asked.params.prompt_logprobs is not None
                assert row.prompt_logprobs == whole or row.finish in ("abort", "error")
            if asked.kind == "embed" and row.finish == "length":
                assert row.embedding == (float(prompt_state(asked.prompt)),)

    def nothing_is_left(self) -> None:
        pools = self.rig.engine.tables.pools
        assert not any(pool.num_active for pool in pools)
        assert not self.rig.engine.scheduler.running and not self.rig.engine.scheduler.waiting
        paid = sum(row.usage.kv_byte_ns for row in self.rows if row.usage)
        assert paid == sum(pool.page_bytes * pool.ledger.active_ns for pool in pools)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_ten_thousand_steps_of_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    long, before = settings(max_examples=1000, stateful_step_count=60, deadline=None), Traffic.checked_steps
    run_state_machine_as_test(Traffic, settings=long)
    steps = Traffic.checked_steps - before
    with capsys.disabled():
        print(f"\n{steps} engine steps of random traffic, the books checked after each")
    assert steps >= 10_000
