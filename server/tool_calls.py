"""Tool calls in a text that comes in parts: text outside calls goes on as content, arguments go out as they come.

Pure: knows the formats' markers, no requests and no HTTP. However the text is cut, the result is the same. Text that
looks like a call but names no offered function stays content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from server.text import StopFinder
from server.tool_formats import ToolFormat
from server.tool_readers import CallReader, NamedCallReader

BETWEEN_CALLS = frozenset(" \t\r\n,;[]")
WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")


@dataclass(slots=True)
class CallDelta:
    """News of one call. id and name come once, with its first delta; arguments is JSON text to be joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of output turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def add_calls(total: list[CallDelta], news: Iterable[CallDelta]) -> None:
    """Join deltas of the same call."""
    for delta in news:
        if total and total[-1].index == delta.index:
            total[-1].arguments += delta.arguments
        else:
            total.append(delta)


class ToolParser:
    """Splits one choice's text. offered: the functions of the request; parallel False: the first call is the last."""

    def __init__(self, format: ToolFormat, offered: frozenset[str], parallel: bool = True) -> None:
        self.completed = 0
        self._format, self._offered, self._parallel = format, offered, parallel
        self._started = 0
        self._state: Callable[[str], None] = self._read_start if format.bare else self._read_text
        self._opener = StopFinder(format.openers)
        self._reader: CallReader | NamedCallReader | None = None
        self._raw = ""  # markup that has not led to a call yet
        self._mark = ""  # the beginning of a closer, or of the next opener
        self._spaces = ""  # white space that counts only if text follows
        self._out = Parsed()

    @property
    def ended(self) -> bool:
        """The one call that was wanted is complete."""
        return not self._parallel and self.completed > 0

    def feed(self, text: str) -> Parsed:
        for char in text:
            if self.ended:
                break
            self._state(char)
        out, self._out = self._out, Parsed()
        return out

    def finish(self) -> Parsed:
        """What was held back. A call that was cut keeps what has gone out; before that its markup is content."""
        if self._state == self._read_text:
            self._say(self._opener.finish())
        elif self._reader is None or self._reader.name is None:
            self._say(self._raw)
        if not self._started:
            self._out.content += self._spaces
        return self.feed("")

    # ---- states: what the next character may be

    def _read_start(self, char: str) -> None:
        """A format without markers: a message that begins with a brace may be a call."""
        if char.isspace():
            self._spaces += char
        elif char == "{":
            self._begin_block("", char)
        else:
            self._state = self._read_text
            self._read_text(char)

    def _read_text(self, char: str) -> None:
        self._say(self._opener.feed(char))
        if self._opener.found is not None:
            self._begin_block(self._opener.found, "")

    def _begin_block(self, opener: str, rest: str) -> None:
        self._raw, self._mark, self._reader = opener, "", None
        self._opener = StopFinder(self._format.openers)
        self._state = self._read_between
        for char in rest:
            self._read_between(char)

    def _read_between(self, char: str) -> None:
        """After an opener or a call: white space, list signs, a call, the closer, or the next opener."""
        self._raw += char
        mark = self._mark + char
        if mark in self._format.ends:
            self._end_block(mark)
        elif any(end.startswith(mark) for end in self._format.ends):
            self._mark = mark
        elif self._mark and set(self._mark) <= BETWEEN_CALLS:
            self._mark, self._raw = "", self._raw[:-1]  # it was a list sign: look at this character alone
            self._read_between(char)
        elif self._mark:
            self._give_up()
        elif char == "{":
            self._begin_call(CallReader(self._offered))
        elif self._format.named and char in WORD:
            self._begin_call(NamedCallReader(self._offered))
            self._feed_reader(char)
        elif char not in BETWEEN_CALLS:
            self._give_up()

    def _end_block(self, mark: str) -> None:
        self._mark = ""
        if mark != self._format.closer:
            self._raw = mark
        elif self._raw_is_markup():
            self._raw, self._state = "", self._read_text
        else:
            self._give_up()

    def _raw_is_markup(self) -> bool:
        """A block with a call in it; one without was text."""
        return self._reader is not None

    def _begin_call(self, reader: CallReader | NamedCallReader) -> None:
        self._reader, self._state = reader, self._read_call

    def _read_call(self, char: str) -> None:
        self._raw += char
        self._feed_reader(char)

    def _feed_reader(self, char: str) -> None:
        reader = self._reader
        assert reader is not None
        was_named = reader.name is not None
        arguments = reader.feed(char)
        if reader.failed:
            self._reader = None
            self._give_up()
            return
        if reader.name is not None and not was_named:
            self._started += 1
            self._raw = self._spaces = ""
            self._out.calls.append(CallDelta(self._started - 1, self._format.new_id(), reader.name))
        if arguments:
            self._argue(arguments)
        if reader.done:
            self.completed += 1
            self._raw, self._state = "", self._read_between

    def _argue(self, arguments: str) -> None:
        index = self._started - 1
        if not self._out.calls or self._out.calls[-1].index != index:
            self._out.calls.append(CallDelta(index))
        self._out.calls[-1].arguments += arguments

    # ---- content

    def _give_up(self) -> None:
        """It was no call: the markup is text. Behind a call, the signs that separate calls are not."""
        raw, self._raw, self._mark = self._raw, "", ""
        self._state = self._read_text
        self._say(raw.lstrip("".join(BETWEEN_CALLS)) if self._reader is not None else raw)
        self._reader = None

    def _say(self, text: str) -> None:
        """White space before a call, between calls and behind the last one is markup."""
        body = text.rstrip()
        if body:
            self._out.content += self._spaces + body
            self._spaces = ""
        self._spaces += text[len(body) :]
