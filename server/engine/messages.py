"""The whole vocabulary between the HTTP process and the engine process: immutable records of plain data.

Token ids only: nothing here knows text, tensors or HTTP. Everything pickles and stays importable without torch. What is
said of the engine as a whole, not of a request, is in facts.py.
What crosses once a token is a NamedTuple: made three times, and sent and read ten times, as fast as a frozen dataclass.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

from server.engine.facts import EngineInfo, EngineStats

FinishReason = Literal["stop", "length", "abort", "error"]
AbortReason = Literal["client", "stop_string", "timeout", "queue_timeout", "slow_reader", "drain"]
SubmitKind = Literal["generate", "embed", "score"]
Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request turns logits into tokens. Every field is already validated and in token ids.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off.
    logprobs None is off, 0 reports the chosen token alone, k adds the k best; same for prompt_logprobs.
    stop_token_ids holds every id that ends the output (EOS included unless ignore_eos was asked for).
    seed is always set: who has none draws one at the edge, so that the engine stays a function of messages.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the output. kind: what was asked for; text: the constraint as llguidance's JSON grammar list."""

    kind: str
    text: str


# ---- HTTP process -> engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """One request. tokens: the prompt as int32 bytes (native order); lower priority values run first.

    pooling: which states make an embedding, the last token's or the mean of all.
    """

    id: str
    tokens: bytes
    params: SamplingParams
    tenant: str = ""
    priority: int = 0
    kind: SubmitKind = "generate"
    grammar: GrammarSpec | None = None
    cache_salt: str = ""
    pooling: Pooling = "last"

    @staticmethod
    def pack(token_ids: list[int]) -> bytes:
        return array("i", token_ids).tobytes()

    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests now, and these single choices (id, choice) of requests that go on.

    What is unknown or has ended is ignored: the output may have crossed this message on the pipe.
    """

    ids: tuple[str, ...]
    reason: AbortReason = "client"
    choices: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """Ask the engine for a view of its state between two steps (kind: kv_summary, kv_requests, kv_pages, ...)."""

    id: int
    kind: str
    arg: object = None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish what runs within `deadline` seconds (0: drop it), then end the process."""

    deadline: float = 0.0


ToEngine = Submit | Abort | Query | Shutdown


# ---- engine -> HTTP process -------------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    """Log-probability (natural, of the unmodified logits) of one token and of the best alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds spent by one request, measured in the engine: waiting, in prefill, in decode."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one request cost, known at its end. cached_tokens: prompt tokens read from the prefix cache."""

    cached_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    kv_peak_bytes: int = 0
    kv_byte_ns: int = 0


class Row(NamedTuple):
    """What one step brought for one choice of one request.

    tokens: the new ids in order (a stop token is included, its text is not shown). finish is None while it runs.
    stop_token: the id that ended it, if one did. error: what to tell the client when finish is "error".
    cached_tokens is set on the first row of the choice, usage on the last, times on both.
    """

    id: str
    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    cached_tokens: int | None = None
    usage: RequestUsage | None = None
    times: RequestTimes | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Start-up news: phase is one of convert, load, allocate, warm_up."""

    phase: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can serve."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Admitted:
    """The waiting of these requests is over: told before the step that computes them, which may take long."""

    ids: tuple[str, ...]


KvEvent = Literal["new", "found", "left", "kept"]
"""What happened to a page: taken to be written; taken with its content; given back; given back by its last holder, and
kept with its content for prompts that begin alike."""
KvChange = tuple[int, int, KvEvent, str, str]
"""(group, page, what, id of the request that took or gave it, its tenant)."""


class StepOutput(NamedTuple):
    """One message a step: everything that happened in it, page changes in order."""

    rows: tuple[Row, ...]
    stats: EngineStats
    kv_delta: tuple[KvChange, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to a Query. error is set when the question could not be answered."""

    id: int
    value: object = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """The engine ends: text is one line for the operator (what failed and what to do)."""

    text: str
    detail: str = ""


FromEngine = Progress | Ready | Admitted | StepOutput | Answer | Crashed
