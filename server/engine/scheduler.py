"""Who computes what in the next step, and who gives way when pages run out.

A function of messages alone: knows no clock, no tensors, no randomness, so that every rank plans the same steps.

Running sequences come first, in order of importance (priority, then admission): a decode takes one token of the
budget, prompts share the rest in chunks. When a page is missing, the least important running sequence is preempted:
it keeps its tokens, gives back its pages and waits at the head of the line. Since a victim is never more important
than whoever needs the page, the most important sequence always proceeds, and alone it always fits (refusal()).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from server.engine.page_tables import PageTables
from server.engine.plan import PlanRow, StepPlan
from server.engine.request import Request, Sequence
from server.engine.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: prompt and output of one choice together. prompt_logits: rows a step for prompt logprobs.

    mixed_chunk: prompt tokens in a step that also decodes, for each prompt that could move on (None: whatever the
    budget leaves). It bounds how long a running stream waits for somebody else's prompt; where many wait, they count
    for more, or the last of them would see its first token after all the others' chunks.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_logits: int = 64
    mixed_chunk: int | None = None


class Scheduler:
    def __init__(self, limits: Limits, tables: PageTables) -> None:
        self.limits = limits
        self.tables = tables
        self.running: list[Sequence] = []  # most important first
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._serial = 0
        self._forks: list[Sequence] = []
        self._token_budget = 0
        self._logit_budget = 0

    def refusal(self, request: Request) -> str | None:
        """Why this request can never run, with the numbers; None if it can."""
        limit = self.limits.max_model_len
        if request.prompt_len == 0:
            return "the prompt is empty: send at least one token"
        if request.prompt_len + request.generates > limit:
            return (
                f"the prompt has {request.prompt_len} tokens and needs room for one more, but the limit is {limit} "
                f"tokens (max_model_len): shorten the prompt"
            )
        return None

    def add(self, request: Request) -> None:
        """To the end of the queue; its first sequence stands for all."""
        self.waiting.push(request.sequences[0])

    def remove(self, sequence: Sequence) -> None:
        """It is finished: its pages go back (full ones stay findable), its place is free."""
        sequence.finished = True
        request = sequence.request
        if sequence in request.unstarted:
            request.unstarted.remove(sequence)
        elif sequence.pages:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.tables.release(sequence)

    # ---- one step -----------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """What the next step computes."""
        plan = StepPlan(copies=[[] for _ in self.tables.pools])
        decoding = [self._decodes(sequence) for sequence in self.running]
        self._set_budgets(sum(decoding))
        preempted = self.num_preemptions
        self._plan_running(decoding, plan)
        if self.waiting and self._has_room and self.num_preemptions == preempted:
            self._admit(plan)
        for fork in self._forks:
            self._enter(fork)
        self._forks.clear()
        return plan

    def _set_budgets(self, num_decodes: int) -> None:
        """What is left for prompts: tokens, and rows of logits."""
        limits = self.limits
        self._token_budget = max(0, limits.max_num_batched_tokens - num_decodes)
        if num_decodes and limits.mixed_chunk is not None:
            room = limits.max_num_seqs - len(self.running)
            prompts = len(self.running) - num_decodes + min(len(self.waiting), room)
            self._token_budget = min(self._token_budget, limits.mixed_chunk * max(1, prompts))
        self._logit_budget = limits.prompt_logits

    def _decodes(self, sequence: Sequence) -> bool:
        """Its next step computes the one token that was sampled last."""
        computed = sequence.num_computed
        return (
            computed >= sequence.prompt_len
            and computed + 1 == len(sequence.tokens) + sequence.num_in_flight
            and (not sequence.num_in_flight or self._may_run(sequence))
        )

    def _may_run(self, sequence: Sequence) -> bool:
        """False while nothing is left to do before the launched step's token is known."""
        if not sequence.num_in_flight:
            return True
        request = sequence.request
        made = sequence.num_output + sequence.num_in_flight
        ends = made >= request.params.max_tokens or sequence.num_tokens >= self.limits.max_model_len
        return not ends and not request.needs_history

    def _plan_running(self, decoding: list[bool], plan: StepPlan) -> None:
        for sequence, decodes in zip(self.running, decoding, strict=False):  # the preempted leave at the far end
            start = sequence.num_computed
            end = start + (1 if decodes else self._take_chunk(sequence))
            if end > sequence.writable and end > start and not self._make_room(sequence, end, plan):
                return
            if decodes:
                sequence.num_computed = end
                sequence.num_in_flight += 1
                plan.rows.append(PlanRow(sequence, start, end, [sequence]))
                plan.num_tokens += 1
            elif end > start:
                self._add_row(sequence, end - start, plan)

    def _take_chunk(self, sequence: Sequence) -> int:
        """Tokens of a prompt to compute in this step, taken off the budget."""
        if not self._may_run(sequence):
            return 0
        chunk = min(sequence.remaining, self._token_budget)
        if sequence.scores_prompt:
            chunk = min(chunk, self._logit_budget)
            self._logit_budget -= chunk
        self._token_budget -= chunk
        return chunk

    def _make_room(self, sequence: Sequence, end: int, plan: StepPlan) -> bool:
        """Reserve pages up to `end`, preempting from the least important end; False if the sequence had to go."""
        while not self.tables.reserve(sequence, end, plan.copies):
            victim = self.running[-1]
            assert victim is not sequence or len(self.running) > 1, "a lone sequence does not fit the pool"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.pop()
        self.tables.release(victim)
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_front(victim)

    def _add_row(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        start = sequence.num_computed
        sequence.num_computed = start + count
        row = PlanRow(sequence, start, start + count, scores_prompt=sequence.scores_prompt)
        plan.rows.append(row)
        plan.num_tokens += count
        if sequence.remaining == 0:
            self._prompt_done(row)

    def _prompt_done(self, row: PlanRow) -> None:
        """Everything known is computed: sample, and let the choices that waited for this prompt join."""
        request = row.sequence.request
        request.prompt_scored = True
        if not request.generates:
            return
        row.samples.append(row.sequence)
        if request.unstarted:
            self._start_choices(row)
        for sample in row.samples:
            sample.num_in_flight += 1

    def _start_choices(self, row: PlanRow) -> None:
        """Fork as many choices as there is room for; the rest wait as sequences of their own.

        Forks begin to run in the next step: this one samples their first token.
        """
        request = row.sequence.request
        room = max(0, self.limits.max_num_seqs - self._num_running)
        forks, late = request.unstarted[:room], request.unstarted[room:]
        request.unstarted = []
        for fork in forks:
            self.tables.fork(row.sequence, fork)
        self._forks += forks
        row.samples += forks
        for sequence in reversed(late):
            self.waiting.push_front(sequence)

    @property
    def _has_room(self) -> bool:
        return self._num_running < self.limits.max_num_seqs and self._token_budget > 0

    @property
    def _num_running(self) -> int:
        return len(self.running) + len(self._forks)

    def _enter(self, sequence: Sequence) -> None:
        sequence.serial = self._serial
        self._serial += 1
        insort(self.running, sequence, key=lambda other: other.importance)

    # ---- admission ----------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        outstanding = self.tables.outstanding(self.running)
        while self._has_room:
            sequence = self.waiting.head()
            if sequence is None or (sequence.scores_prompt and self._logit_budget == 0):
                return
            # A preempted sequence comes back once the others can all grow by a page, or it would be evicted again.
            spare = self._num_running if sequence.preemptions else 0
            if not self.tables.admit(sequence, outstanding, spare):
                return
            self.waiting.pop()
            self._start(sequence, plan)
            more = self.tables.outstanding([sequence])
            outstanding = [old + new for old, new in zip(outstanding, more, strict=True)]

    def _start(self, sequence: Sequence, plan: StepPlan) -> None:
        self._enter(sequence)
        plan.admitted.append(sequence)
        if sequence.request.num_cached is None:
            sequence.request.num_cached = sequence.num_computed
            self.prefix_queries += sequence.request.prompt_len
            self.prefix_hits += sequence.num_computed
        count = self._take_chunk(sequence)
        fits = self.tables.reserve(sequence, sequence.num_computed + count, plan.copies)
        assert fits, "an admitted prompt does not fit"
        self._add_row(sequence, count, plan)
