"""One choice of a request: tokens come in, its text, reasoning, tool calls and end go out.

Knows neither the request it belongs to nor how the engine is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from server.engine.messages import RequestTimes, Row, TokenLogprob
from server.metrics import RequestClock
from server.output_parser import OutputParser
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


def prompt_text(vocabulary: TokenBytes, tokens: list[int], text: str) -> PromptText:
    """A completion's prompt: the reply goes on from its text, if it has any."""
    return PromptText(tokens, text, at_start=all(token in vocabulary.special for token in tokens))


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
        """Add one row to the delta; True if the text is complete before the engine knew."""
        if row.tokens:
            self.clock.token()
        if row.times is not None:
            self.times = row.times
        if row.prompt_logprobs is not None and self._options.prompt_logprobs is not None:
            delta.prompt_logprobs = [best(entry, self._options.prompt_logprobs) for entry in row.prompt_logprobs]
        if not self._opened:
            self._echo(row, delta)
        is_over = not self._options.hide_output and self._take_tokens(row, delta)
        if is_over:
            self.times = replace(self.times, decode=self.clock.since_first_token())
            self._end("stop", delta)
        elif row.finish is not None:
            self._end(row.finish, delta)
        return is_over and row.finish is None

    def _take_tokens(self, row: Row, delta: Delta) -> bool:
        """True if the text is complete: tokens behind a stop string never were, they are neither shown nor counted."""
        for position, token in enumerate(row.tokens):
            self.tokens += 1
            delta.tokens.append(token)
            if row.logprobs:
                delta.logprobs.append(row.logprobs[position])
                delta.offsets.append(self._base + self._text.decoded_length)
            if token != row.stop_token or position < len(row.tokens) - 1:
                self._show(self._text.feed(token), delta)
                if self._is_over:
                    return True
        return False

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
