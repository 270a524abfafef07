"""What a script gets back: Output, with its choices and its cost, and how the rows of a request become one.

Knows no engine and no settings: whoever runs the requests feeds the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.messages import Row, TokenLogprob
from server.generation import Generation


@dataclass(slots=True)
class Completion:
    """One choice. token_ids end with the stop token, if one ended it; finish_reason is stop, length or error.

    logprobs: one entry a token, if they were asked for. stop_reason: the stop string that ended it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, and what the KV cache spent on the request: most bytes at once, and bytes times seconds."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_peak_bytes: int
    kv_byte_seconds: float


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt: n choices, the first one at hand. error: why it has none, or only a part."""

    choices: list[Completion]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


class Run:
    """One request on its way: rows come in, an Output comes out."""

    def __init__(self, generation: Generation, wants_logprobs: bool) -> None:
        self.generation = generation
        self._choices = [Completion(logprobs=[] if wants_logprobs else None) for _ in generation.choices]
        self._prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(submit.id for submit in self.generation.submits)

    @property
    def done(self) -> bool:
        choices = self.generation.choices.values()
        return self.generation.failure is not None or all(choice.finish for choice in choices)

    def take(self, row: Row) -> None:
        for delta in self.generation.take([row]):
            choice = self._choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.tokens
            if choice.logprobs is not None:
                choice.logprobs += delta.logprobs
            choice.finish_reason, choice.stop_reason = delta.finish, delta.stop
            self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs

    def output(self) -> Output:
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or "error"
        generation, cost = self.generation, self.generation.kv_cost() or {"peak_bytes": 0, "byte_seconds": 0.0}
        usage = Usage(
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
            cost["peak_bytes"],
            cost["byte_seconds"],
        )
        return Output(self._choices, usage, self._prompt_logprobs, generation.failure)
