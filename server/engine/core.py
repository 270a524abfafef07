"""The engine: add, abort, step. Plans, launches, collects, and turns results into rows for the clients.

Token ids in, token ids out: knows no text, no HTTP, no device. A step that a device is still computing is collected
after the next one is launched (runner.overlaps); everything else is the same for all devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from server.engine.facts import EngineInfo, EngineStats
from server.engine.grammar import Grammars, Matcher
from server.engine.messages import (
    Abort,
    Answer,
    FinishReason,
    GrammarSpec,
    Query,
    StepOutput,
    Submit,
)
from server.engine.plan import Pending, PlanRow, RowResult, Runner, SampledToken, StepPlan
from server.engine.request import Request, Sequence
from server.engine.resident import ResidentMemory
from server.engine.scheduler import Scheduler
from server.engine.stats import Counters, engine_stats
from server.engine.step_rows import StepRows
from server.engine.views import VIEWS

NAN = "no token could be sampled: the model produced NaN or infinite logits (or the request rules out every token)"

KV_RESIDENT_INTERVAL_NS = 1_000_000_000
"""Asking the system about each of a million pages takes milliseconds: once a second at most."""


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        clock: Callable[[], int] = time.monotonic_ns,
        kv_resident: Callable[[], int] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """kv_resident measures how much of the pool is in memory; without it, all that was allocated counts.

        Without grammars, requests that bring one are refused.
        """
        self.scheduler = scheduler
        self.tables = scheduler.tables
        self.info = info
        self.grammars = grammars
        self.on_admission: Callable[[tuple[str, ...]], None] = lambda ids: None
        self._runner = runner
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._launched: tuple[StepPlan, Pending] | None = None
        self._rows = StepRows(clock)
        self._resident = ResidentMemory()
        self._kv_resident = ResidentMemory(kv_resident or (lambda: info.kv_bytes_allocated), KV_RESIDENT_INTERVAL_NS)
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._rows or self._launched)

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    # ---- messages -----------------------------------------------------------------------------------------

    def add(self, submit: Submit) -> None:
        """Queue a request. What can never run ends at once, with a row that says why."""
        assert submit.id not in self._requests, f"request id {submit.id} is in use"
        request = Request.from_submit(submit, self._clock())
        error = self._bad_token(request) or self.scheduler.refusal(request) or self._constrain(request, submit.grammar)
        if error is not None:
            self.refuse(submit.id, error)
            request.let_go()
            return
        self._requests[submit.id] = request
        self.scheduler.add(request)

    def refuse(self, request_id: str, error: str) -> None:
        """End a request that was never added, in the next step's rows."""
        self._rows.refuse(request_id, error)

    def _constrain(self, request: Request, grammar: GrammarSpec | None) -> str | None:
        """Give the request its grammar (the worker has had it compiled); returns what is wrong with it."""
        if grammar is None:
            return None
        if self.grammars is None:
            return "structured output is not available in this engine"
        try:
            request.constrain(self.grammars.matcher(grammar))
        except ValueError as error:
            return f"{grammar.kind}: {error}"
        return None

    def _bad_token(self, request: Request) -> str | None:
        params = request.params
        named = [*params.allowed_token_ids, *(token for token, _ in params.logit_bias), *params.stop_token_ids]
        named += [token for word in params.bad_words for token in word]
        prompt = request.sequences[0].tokens
        if prompt:
            named += [min(prompt), max(prompt)]
        bad = next((token for token in named if not 0 <= token < self.info.vocab_size), None)
        return None if bad is None else f"token id {bad} is outside the vocabulary of {self.info.vocab_size}"

    def abort(self, abort: Abort) -> None:
        """End requests or single choices now; their full pages stay in the prefix cache."""
        self.tables.advance(self._clock())
        for request_id in abort.ids:
            if request_id in self._requests:
                self._end_request(self._requests[request_id], "abort")
        for request_id, choice in abort.choices:
            if request_id in self._requests:
                self._end_choice(self._requests[request_id], choice)

    def query(self, query: Query) -> Answer:
        if query.kind not in VIEWS:
            return Answer(query.id, error=f"unknown query {query.kind!r}: one of {', '.join(sorted(VIEWS))}")
        self.tables.advance(self._clock())
        return Answer(query.id, VIEWS[query.kind](self))

    def kv_resident_bytes(self) -> int:
        """Bytes of the pool that the system holds in memory, as last measured."""
        return self._kv_resident.read(self._clock())

    def rss_bytes(self) -> int:
        return self._resident.read(self._clock())

    # ---- one step -----------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Plan and launch a step, collect what is due, and report everything that happened since the last call."""
        started = self._clock()
        self.tables.advance(started)
        plan = self.scheduler.plan()
        if plan.admitted:
            self._note_admissions([sequence.request for sequence in plan.admitted], started)
        due = self._launch(plan)
        if due is not None:
            self._collect(*due)
        rows = self._rows.take()
        assert rows or due or plan.rows or not self._requests, "nothing runs, yet requests wait"
        return StepOutput(rows, self._stats(plan, started), self.tables.take_changes())

    def _note_admissions(self, requests: list[Request], now: int) -> None:
        """Forked choices begin with the request's first one."""
        self.on_admission(tuple(request.id for request in requests))
        for request in requests:
            for sequence in request.sequences:
                if sequence.admitted_ns is None and sequence.pages:
                    sequence.admitted_ns = now

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, Pending] | None:
        """Start the plan; returns the step that is to be collected now."""
        launched = (plan, self._runner.launch(plan)) if plan.rows else None
        if not self._runner.overlaps:
            return launched
        due, self._launched = self._launched, launched
        return due

    def _collect(self, plan: StepPlan, pending: Pending) -> None:
        results = pending.collect()
        now = self._clock()
        self.tables.advance(now)
        for row, result in zip(plan.rows, results, strict=True):
            self._take(row, result, now)

    def _take(self, row: PlanRow, result: RowResult, now: int) -> None:
        sequence, request = row.sequence, row.sequence.request
        if result.error is not None and not sequence.finished:
            self._end_request(request, "error", result.error)
        if not result.finite and not sequence.finished:
            self._fail_nan(request)
        if not sequence.finished:
            self.tables.register(sequence, row.end)
            if request.prompt_logprobs is not None or not request.prompt_counted:
                self._take_prompt(row, result)
        for sample, token in zip(row.samples, result.tokens, strict=False):
            if not sample.finished:
                self._take_token(sample, token, now)
        if not request.generates and not sequence.finished and row.end == request.prompt_len:
            self._end_unsampled(request, result)

    def _take_prompt(self, row: PlanRow, result: RowResult) -> None:
        request = row.sequence.request
        if request.prompt_logprobs is not None and result.prompt_logprobs:
            start = row.start + 1
            request.prompt_logprobs[start : start + len(result.prompt_logprobs)] = result.prompt_logprobs
            if any(math.isnan(scored.logprob) for scored in result.prompt_logprobs):
                self._fail_nan(request)
        if row.end >= request.prompt_len and not request.prompt_counted:
            request.prompt_counted = True
            self._counters.prompt_tokens += request.prompt_len

    def _take_token(self, sequence: Sequence, sampled: SampledToken, now: int) -> None:
        if not sampled.finite:
            self._fail_nan(sequence.request)
            return
        sequence.append(sampled.token)
        if sequence.matcher is not None and not self._follow(sequence, sequence.matcher, sampled.token):
            return
        self._counters.generation_tokens += 1
        if sequence.first_token_ns is None:
            sequence.first_token_ns = now
        finish = self._finish_reason(sequence, sampled.token)
        if finish is not None:
            self.scheduler.remove(sequence)
        if sequence.request.is_ranked:
            self._rows.hold(sequence, sampled, finish)
        else:
            self._rows.report(sequence, (sampled.token,), (sampled.logprob,) if sampled.logprob else (), finish)
        if finish is not None:
            self._forget_if_done(sequence.request)

    def _follow(self, sequence: Sequence, matcher: Matcher, token: int) -> bool:
        """Advance the grammar; False if it could not go on and the request had to end."""
        if token not in sequence.request.stop_ids:
            matcher.accept(token)
        if matcher.error is not None:
            self._end_request(sequence.request, "error", f"the grammar cannot go on: {matcher.error}")
        return not sequence.finished

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.stop_ids:
            return "stop"
        if sequence.matcher is not None and sequence.matcher.is_complete:
            return "stop"
        at_limit = len(sequence.tokens) >= self.scheduler.limits.max_model_len
        return "length" if at_limit or sequence.num_output >= request.params.max_tokens else None

    def _fail_nan(self, request: Request) -> None:
        self._counters.nan_rows += 1
        for sequence in request.sequences:
            self.tables.forget(sequence)
        self._end_request(request, "error", NAN)

    def _end_request(self, request: Request, finish: FinishReason, error: str | None = None) -> None:
        """End every choice that still lives."""
        live = [sequence for sequence in request.sequences if not sequence.finished]
        for sequence in live:
            self.scheduler.remove(sequence)
        if request.is_ranked:
            live = request.sequences[: request.params.n]
            live[0].byte_ns += sum(sequence.byte_ns for sequence in request.sequences[request.params.n :])
        for sequence in live:
            self._rows.report(sequence, finish=finish, error=error)
        self._forget_if_done(request)

    def _end_choice(self, request: Request, choice: int) -> None:
        """One choice has said enough. Before its first row it may still be the one that computes the prompt for all."""
        sequence = next((sequence for sequence in request.sequences if sequence.choice == choice), None)
        if sequence is None or sequence.finished or not sequence.reported:
            return
        self.scheduler.remove(sequence)
        self._rows.report(sequence, finish="abort")
        self._forget_if_done(request)

    def _end_unsampled(self, request: Request, result: RowResult) -> None:
        """The prompt was all there was to compute: an embedding, a score, or max_tokens 0."""
        for sequence in request.sequences:
            self.scheduler.remove(sequence)
        for sequence in request.sequences[: request.params.n]:
            self._rows.report(sequence, finish="length", embedding=result.embedding)
        self._forget_if_done(request)

    def _forget_if_done(self, request: Request) -> None:
        if all(sequence.finished for sequence in request.sequences):
            self._requests.pop(request.id, None)
            request.let_go()

    # ---- books --------------------------------------------------------------------------------------------

    def _stats(self, plan: StepPlan, started: int) -> EngineStats:
        now = self._clock()
        self.tables.advance(now)
        self._counters.steps += bool(plan.rows)
        return engine_stats(self._counters, self.scheduler, plan, started, now, self._resident.read(now))

    def check_integrity(self) -> None:
        """Compare the books with each other; raises AssertionError where they differ."""
        self.tables.check_integrity(self.scheduler.running)
        placed = [*self.scheduler.running, *self.scheduler.waiting]
        placed += [sequence for request in self._requests.values() for sequence in request.unstarted]
        live = [s for request in self._requests.values() for s in request.sequences if not s.finished]
        assert sorted(map(id, placed)) == sorted(map(id, live)), "a live sequence is nowhere, or in two places"
        assert all(not sequence.pages for sequence in self.scheduler.waiting), "a waiting sequence holds pages"
