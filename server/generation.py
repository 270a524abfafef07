"""One API request as the engine's choices: rows come in, text deltas go out, the same for streams and whole replies.

Knows tokens and text, no JSON shapes: routes turn deltas into the format of their API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.client import EngineClient, EngineDeadError, QueueFullError, StreamCutError
from server.engine.messages import GrammarSpec, RequestTimes, RequestUsage, Row, SamplingParams, Submit, TokenLogprob
from server.errors import ApiError
from server.metrics import Metrics, RequestClock
from server.output_parser import OutputParser
from server.stream import Stream
from server.text import TextStream
from server.token_bytes import TokenBytes
from server.tool_calls import CallDelta, Parsed, add_calls


@dataclass(slots=True)
class Delta:
    """News of one choice. offsets: where each token of logprobs starts in the text. finish: how it ended, once.

    stop: the stop string that ended it, if one did. prompt_logprobs: of the prompt, once, if they were asked for.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def is_plain(self) -> bool:
        """It brings text and nothing else."""
        scored = self.logprobs or self.prompt_logprobs is not None
        return bool(self.text) and not (self.reasoning or self.calls or self.finish or scored)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens of one request become text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    hide_output: bool = False
    """Nothing was asked for but the prompt (echo with max_tokens 0); the engine always makes one token."""
    shown: frozenset[int] = frozenset()
    parser: Callable[[], OutputParser] | None = None
    """Takes each choice's text apart; shown: special tokens it has to see. None: all text is content."""
    calls_finish: str = "tool_calls"
    """How a choice with a tool call ends, where the engine says stop."""
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Alternatives of each prompt token, in the echo and in a list of their own; the engine sends the larger number."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt. at_start: the reply stands alone (a chat turn) rather than after the prompt's text."""

    tokens: list[int]
    text: str = ""
    at_start: bool = True


class Choice:
    """The text, the count and the end of one choice."""

    def __init__(
        self, index: int, prompt: PromptText, vocabulary: TokenBytes, options: TextOptions, clock: RequestClock
    ) -> None:
        self.index = index
        self.clock = clock
        self.tokens = 0
        self.finish: str | None = None
        self.times = RequestTimes()
        self._prompt, self._vocabulary, self._options = prompt, vocabulary, options
        self._text = TextStream(
            vocabulary,
            options.stops,
            include_stop=options.include_stop,
            skip_special=options.skip_special,
            shown=options.shown,
            at_start=prompt.at_start,
        )
        self._parser = options.parser() if options.parser is not None else None
        self._base = len(prompt.text) if options.echo else 0
        self._opened = not options.echo

    def take(self, row: Row, delta: Delta) -> bool:
        """Add one row to the delta; True if the text is complete before the engine knew.

        Tokens behind a stop string never were: they are neither shown nor counted.
        """
        if row.tokens:
            self.clock.token()
        if row.times is not None:
            self.times = row.times
        if row.prompt_logprobs is not None and self._options.prompt_logprobs is not None:
            delta.prompt_logprobs = [best(entry, self._options.prompt_logprobs) for entry in row.prompt_logprobs]
        if not self._opened:
            self._echo(row, delta)
        is_over = False
        for position, token in enumerate(row.tokens if not self._options.hide_output else ()):
            self.tokens += 1
            delta.tokens.append(token)
            if row.logprobs:
                delta.logprobs.append(row.logprobs[position])
                delta.offsets.append(self._base + self._text.decoded_length)
            if token != row.stop_token or position < len(row.tokens) - 1:
                self._show(self._text.feed(token), delta)
                if is_over := self._is_over:
                    break
        if is_over:
            self.times = replace(self.times, decode=self.clock.since_first_token())
            self._end("stop", delta)
        elif row.finish is not None:
            self._end(row.finish, delta)
        return is_over and row.finish is None

    @property
    def _is_over(self) -> bool:
        """The text is complete, whatever the engine still makes."""
        return self._text.stop is not None or (self._parser is not None and self._parser.ended)

    def _show(self, text: str, delta: Delta) -> None:
        if self._parser is None:
            delta.text += text
        else:
            self._add(self._parser.feed(text), delta)

    def _add(self, parsed: Parsed, delta: Delta) -> None:
        delta.text += parsed.content
        delta.reasoning += parsed.reasoning
        add_calls(delta.calls, parsed.calls)

    def _end(self, reason: str, delta: Delta) -> None:
        self._show(self._text.finish(), delta)
        delta.stop = self._text.stop
        self.finish = delta.finish = "stop" if delta.stop is not None else reason
        if self._parser is not None:
            self._add(self._parser.finish(), delta)
            if reason == "stop" and self._parser.completed_calls:
                delta.finish = self._options.calls_finish
        self.clock.finished(self.finish, self.tokens)

    def leave(self) -> None:
        """Whoever waited is gone: a choice that has not ended by itself counts as aborted."""
        if self.finish is None:
            self.finish = "abort"
            self.clock.finished("abort", self.tokens)

    def cut(self) -> Delta:
        """The end of a choice whose time is over."""
        delta = Delta(self.index)
        self._end("length", delta)
        return delta

    def _echo(self, row: Row, delta: Delta) -> None:
        self._opened = True
        delta.text += self._prompt.text
        if row.prompt_logprobs is None or self._options.echo_logprobs is None:
            return
        stream = TextStream(self._vocabulary, skip_special=False)
        for token, entry in zip(self._prompt.tokens, row.prompt_logprobs, strict=True):
            delta.logprobs.append(best(entry, self._options.echo_logprobs) or TokenLogprob(token, float("nan")))
            delta.offsets.append(min(stream.decoded_length, self._base))
            stream.feed(token)


def best(entry: TokenLogprob | None, count: int) -> TokenLogprob | None:
    """The entry with its `count` best alternatives."""
    return entry and entry._replace(top=entry.top[:count])


class Generation:
    """All prompts and choices of one request: choice c of prompt p has index p * n + c."""

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[PromptText],
        params: Sequence[SamplingParams],
        vocabulary: TokenBytes,
        options: TextOptions,
        metrics: Metrics,
        *,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> None:
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.warnings: list[str] = []
        self._cached: dict[str, int] = {}
        self._stream: Stream | None = None
        self.failure: str | None = None
        self.kv_usage = False
        """The engine's bill for KV memory is wanted: it comes with the last row of a choice, even of a stopped one."""
        self._bills: list[RequestUsage] = []
        self._complete: list[tuple[str, int]] = []  # choices whose text ended before the engine knew
        self.submits = [
            Submit(
                f"{request_id}-{index}",
                Submit.pack(prompt.tokens),
                own,
                priority=priority,
                grammar=grammar,
                cache_salt=cache_salt,
            )
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        n = params[0].n
        self.choices = {
            (submit.id, choice): Choice(
                index * n + choice, prompt, vocabulary, options, metrics.request(len(prompt.tokens))
            )
            for index, (submit, prompt) in enumerate(zip(self.submits, prompts, strict=True))
            for choice in range(n)
        }

    def set_tenant(self, tenant: str) -> None:
        """Whose requests these are, for fair queueing and the KV accounts."""
        self.submits = [replace(submit, tenant=tenant) for submit in self.submits]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def ends(self) -> list[str]:
        """How each choice ended, "running" if it has not."""
        return [choice.finish or "running" for choice in self.choices.values()]

    @property
    def times(self) -> RequestTimes:
        """The longest of all choices: they run side by side."""
        each = [choice.times for choice in self.choices.values()]
        return RequestTimes(*(max(getattr(times, name) for times in each) for name in ("queue", "prefill", "decode")))

    def kv_cost(self) -> dict[str, Any] | None:
        """Sums over the choices, or None until the engine has told the cost of each."""
        if len(self._bills) < len(self.choices):
            return None
        return {
            "peak_bytes": sum(bill.kv_peak_bytes for bill in self._bills),
            "byte_seconds": sum(bill.kv_byte_ns for bill in self._bills) / 1e9,
            "pages": sum(bill.peak_pages for bill in self._bills),
            "cached_tokens": self.cached_tokens,
        }

    async def deltas(
        self, client: EngineClient, timeout: float | None = None, queue_timeout: float | None = None
    ) -> AsyncIterator[list[Delta]]:
        """Submit and follow to the end; ApiError when there is no answer. Closing the iterator aborts."""
        try:
            async with client.stream(self.submits, timeout, queue_timeout) as stream:
                self._stream = stream
                async for rows in stream:
                    yield self.take(rows)
                    if self.failure is not None:
                        raise ApiError(500, self.failure, code="request_failed")
                    if all(choice.finish for choice in self.choices.values()):
                        client.finish(stream, wait=self.kv_usage)
                    elif self._complete:
                        client.finish_choices(self._complete)
                    self._complete = []
        except StreamCutError as cut:
            if cut.reason != "timeout":
                raise refusal_of(cut) from None
            self.warnings.append(f"timeout: ended after {timeout:g} s, before max_tokens or a stop")
            yield [choice.cut() for choice in self.choices.values() if choice.finish is None]
        except QueueFullError as full:
            raise queue_is_full(full) from None
        except EngineDeadError as dead:
            raise engine_is_dead(dead) from None
        finally:
            for choice in self.choices.values():
                choice.leave()

    def cut_off(self, client: EngineClient) -> None:
        """End the request because nobody reads its stream."""
        if self._stream is not None:
            client.abort(self._stream, "slow_reader")

    def take(self, rows: list[Row]) -> list[Delta]:
        """What these rows bring, one delta a choice; `failure` says so if the engine gave the request up."""
        deltas: dict[int, Delta] = {}
        for row in rows:
            choice = self.choices[(row.id, row.choice)]
            if row.usage is not None:
                self._bills.append(row.usage)
            if choice.finish is not None:
                continue
            if row.finish in ("error", "abort"):
                self.failure = row.error or "the engine gave this request up"
                break  # what came before it is still shown
            if row.cached_tokens is not None:
                self._cached.setdefault(row.id, row.cached_tokens)
            if choice.take(row, deltas.setdefault(choice.index, Delta(choice.index))):
                self._complete.append((row.id, row.choice))
        return list(deltas.values())


def refusal_of(cut: StreamCutError) -> ApiError:
    text = {
        "queue_timeout": "queue_timeout: the request did not get its turn in time",
        "drain": "the server is shutting down and this request ran out of time",
        "slow_reader": "the stream was not read for too long",
    }.get(cut.reason, f"the request was ended ({cut.reason})")
    return ApiError(503, text, code=cut.reason, headers={"Retry-After": "1"})


def queue_is_full(full: QueueFullError) -> ApiError:
    return ApiError(429, str(full), code="queue_full", headers={"Retry-After": str(full.retry_after)})


def engine_is_dead(dead: EngineDeadError) -> ApiError:
    return ApiError(500, f"the engine is gone: {dead}", code="engine_dead")


def prompt_text(vocabulary: TokenBytes, tokens: list[int], text: str) -> PromptText:
    """A completion's prompt: the reply goes on from its text, if it has any."""
    return PromptText(tokens, text, at_start=all(token in vocabulary.special for token in tokens))
