"""A request and its choices: every length and counter of the engine lives here, once.

Knows neither pools nor tensors: pages are numbers, tokens are ids. Others read these fields, nobody recomputes them.

    tokens    [ prompt ............ | output ...... ] + in flight (sampled, not yet on the host)
    computed  [ cached | chunk | chunk ... )           KV is in the pool, or will be when the launched step ends
    pages[g]  [ 7 | 3 | 9 | ... ]                      page i of group g holds tokens i * page_size ...; 0 = given back
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property

from server.engine.grammar import Matcher
from server.engine.messages import FinishReason, RequestTimes, RequestUsage, SamplingParams, Submit, TokenLogprob
from server.engine.pages import Key, page_key, root_key
from server.engine.pooling import MeanState


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request."""

    request: Request
    choice: int
    tokens: array[int]
    prompt_len: int
    num_computed: int = 0
    num_in_flight: int = 0
    pages: list[array[int]] = field(default_factory=list)
    first_live: list[int] = field(default_factory=list)  # per group: pages before it are given back (window)
    keys: list[Key] = field(default_factory=list)
    num_registered: int = 0  # pages offered to the prefix cache so far
    shares_tail: bool = False  # forked: the partial last page may be somebody else's too
    writable: int = 0  # positions before this have a page of their own: no reservation is needed to write them
    serial: int = 0  # order of admission
    finished: bool = False
    preemptions: int = 0
    pages_held: int = 0
    bytes_held: int = 0
    peak_pages: int = 0
    peak_bytes: int = 0
    byte_ns: int = 0  # page_bytes * (h at release - h at acquire); open pages count with -h at acquire
    reported: bool = False  # its first row is out
    held: list[TokenLogprob] = field(default_factory=list)  # best_of: not reported before all choices end
    finish: FinishReason | None = None
    counts: dict[int, int] = field(default_factory=dict)  # output tokens by id; kept if penalties ask for it
    seen: array[int] = field(default_factory=lambda: array("q"))  # distinct prompt and output ids, same
    matcher: Matcher | None = None  # how far the output has come in the request's grammar
    admitted_ns: int | None = None
    first_token_ns: int | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output, those in flight included."""
        return len(self.tokens) + self.num_in_flight

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Logits of the prompt rows are wanted: by the first choice alone, and once."""
        return not self.request.prompt_scored and self.choice == 0

    @property
    def importance(self) -> tuple[int, int]:
        """Lower runs first and is preempted last."""
        return self.request.priority, self.serial

    def extend_keys(self, page_size: int, num_pages: int) -> None:
        """Compute the chained keys of the first num_pages full pages."""
        for page in range(len(self.keys), num_pages):
            parent = self.keys[-1] if self.keys else self.request.root_key
            self.keys.append(page_key(parent, self.tokens[page * page_size : (page + 1) * page_size].tobytes()))

    def append(self, token: int) -> None:
        """Take the token that was in flight."""
        self.num_in_flight -= 1
        self.tokens.append(token)
        if self.request.is_penalised:
            self.count(token)

    def count(self, token: int) -> None:
        if token not in self.counts:
            self.seen.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1

    def output_ids(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.prompt_len :])

    @property
    def mean_logprob(self) -> float:
        return sum(logprob.logprob for logprob in self.held) / len(self.held)

    def usage(self) -> RequestUsage:
        """What this choice cost. Its pages are released."""
        return RequestUsage(
            cached_tokens=self.request.num_cached or 0,
            preemptions=self.preemptions,
            peak_pages=self.peak_pages,
            kv_peak_bytes=self.peak_bytes,
            kv_byte_ns=self.byte_ns,
        )

    def times(self, now_ns: int) -> RequestTimes:
        admitted = now_ns if self.admitted_ns is None else self.admitted_ns
        first = now_ns if self.first_token_ns is None else self.first_token_ns
        queue = admitted - self.request.arrived_ns
        return RequestTimes(queue / 1e9, max(0, first - admitted) / 1e9, (now_ns - first) / 1e9)


@dataclass(eq=False)
class Request:
    """What was submitted, and what its choices have in common."""

    id: str
    params: SamplingParams
    prompt_len: int
    tenant: str
    priority: int
    kind: str
    salt: str
    arrived_ns: int
    sequences: list[Sequence] = field(default_factory=list)
    unstarted: list[Sequence] = field(default_factory=list)  # choices that wait for the first one's prompt
    num_cached: int | None = None  # prompt tokens the first admission found in the prefix cache
    prompt_counted: bool = False
    prompt_logprobs: list[TokenLogprob | None] | None = None
    mean_state: MeanState | None = None  # an embedding that is the mean of all states
    prompt_scored: bool = True  # False while prompt logprobs are wanted and not all planned

    @classmethod
    def from_submit(cls, submit: Submit, now_ns: int) -> Request:
        prompt = array("i", submit.tokens)
        params = submit.params
        request = cls(
            submit.id, params, len(prompt), submit.tenant, submit.priority, submit.kind, submit.cache_salt, now_ns
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
            request.prompt_scored = False
        if submit.kind == "embed" and submit.pooling == "mean":
            request.mean_state = MeanState()
        width = max(params.n, params.best_of or 0)
        request.sequences = [Sequence(request, choice, prompt[:], len(prompt)) for choice in range(width)]
        request.unstarted = request.sequences[1:]
        if request.is_penalised:
            distinct = array("q", dict.fromkeys(prompt))
            for sequence in request.sequences:
                sequence.seen = distinct[:]
                sequence.counts = dict.fromkeys(distinct, 0)
        return request

    def constrain(self, matcher: Matcher) -> None:
        """Every choice follows the grammar on its own."""
        for sequence in self.sequences:
            sequence.matcher = matcher.copy()

    def let_go(self) -> None:
        """It is over. Sequences refer to it: as a circle they would stay in memory until a full garbage collection."""
        self.sequences, self.unstarted = [], []

    @cached_property
    def root_key(self) -> Key:
        return root_key(self.salt)

    @cached_property
    def is_penalised(self) -> bool:
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)

    @cached_property
    def needs_history(self) -> bool:
        """The next token's sampling depends on the last token's id: it cannot be launched before that is known."""
        return self.is_penalised or bool(self.params.bad_words) or self.sequences[0].matcher is not None

    @cached_property
    def adjusts_logits(self) -> bool:
        """The model's logits may be changed before a token is drawn from them."""
        params = self.params
        listed = params.logit_bias or params.allowed_token_ids or params.min_tokens > 0
        return bool(listed) or self.needs_history

    @cached_property
    def generates(self) -> bool:
        return self.kind == "generate" and self.params.max_tokens > 0

    @cached_property
    def is_ranked(self) -> bool:
        """best_of: more choices run than are reported, so none can be reported before all have ended."""
        return len(self.sequences) > self.params.n

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids)
