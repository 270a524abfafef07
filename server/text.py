"""From token ids to text, a token at a time: TextStream decodes, finds stop strings, holds back what is not sure.

Pure: knows no requests and no HTTP. However the tokens arrive, the text is the same, streamed or not.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.token_bytes import TokenBytes


class StopFinder:
    """Looks for stop strings in a text that comes in parts.

    The match that is complete first ends the text (the longer of two that end together), so the answer cannot depend
    on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Text that no stop string can claim any more. After a match: what came before it, then nothing."""
        self._held += text
        matches = [(self._held.find(stop), stop) for stop in self._stops]
        complete = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if complete:
            _, start, self.found = min(complete)
            return self._release(start)
        return self._release(len(self._held) - self._longest_beginning())

    def finish(self) -> str:
        return self._release(len(self._held))

    @property
    def rest(self) -> str:
        """What has come behind the match so far (the match itself is left out)."""
        return self._held[len(self.found or "") :]

    def _release(self, length: int) -> str:
        sure, self._held = self._held[:length], self._held[length:]
        return sure

    def _longest_beginning(self) -> int:
        """How much of the end of the held text may be the beginning of a stop string."""
        lengths = range(max(map(len, self._stops)) - 1, 0, -1)
        tails = (self._held[-length:] for length in lengths if length <= len(self._held))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stops)), 0)


class TextStream:
    """The text of one choice.

    Bytes that are no whole character wait for the next token; at the end they become one U+FFFD. `at_start` says that
    nothing stands before this text, so that a decoder which takes a space off the start of a text does so.
    `shown`: special tokens that count as text all the same, since a parser looks for them.
    """

    def __init__(
        self,
        vocabulary: TokenBytes,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
        at_start: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopFinder(stops) if stops else None
        self._include_stop = include_stop
        self._skipped = vocabulary.special - shown if skip_special else frozenset[int]()
        self._leading_spaces = vocabulary.leading_spaces if at_start else 0
        self.decoded_length = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, once there is one."""
        return self._stops.found if self._stops is not None else None

    def feed(self, token: int) -> str:
        """Text that has become sure with this token; nothing more after a stop string."""
        if self.stop is not None or token in self._skipped:
            return ""
        text = self._decoder.decode(self._vocabulary[token])
        return self._through_stops(self._strip(text) if self._leading_spaces else text)

    def finish(self) -> str:
        """What was held back. A broken last character is one U+FFFD."""
        if self.stop is not None:
            return ""
        tail = self._through_stops(self._strip(self._decoder.decode(b"", final=True)))
        return tail if self._stops is None or self.stop is not None else tail + self._stops.finish()

    def _strip(self, text: str) -> str:
        while text and self._leading_spaces:
            if not text.startswith(" "):
                self._leading_spaces = 0
                break
            text, self._leading_spaces = text[1:], self._leading_spaces - 1
        return text

    def _through_stops(self, text: str) -> str:
        self.decoded_length += len(text)
        if self._stops is None:
            return text
        sure = self._stops.feed(text)
        return sure + self.stop if self.stop is not None and self._include_stop else sure


def decode(vocabulary: TokenBytes, tokens: Sequence[int], *, skip_special: bool = True, at_start: bool = True) -> str:
    stream = TextStream(vocabulary, skip_special=skip_special, at_start=at_start)
    return "".join([stream.feed(token) for token in tokens]) + stream.finish()
