"""Splits what a model thought from what it answers: <think> ... </think> at the start of its output.

Pure: however the text is cut, the result is the same. White space around both parts is dropped.
"""

from __future__ import annotations

from server.text import StopFinder

OPENER, CLOSER = "<think>", "</think>"
MARKERS = (OPENER, CLOSER)


def thinks(template: str) -> bool:
    """Whether a chat template shows that its model does."""
    return CLOSER in template


def is_open(rendered: str) -> bool:
    """Whether the prompt has begun the thought for the model."""
    return rendered.rstrip().endswith(OPENER)


class ReasoningSplitter:
    """opened: the prompt ends inside a thought already."""

    def __init__(self, opened: bool) -> None:
        self._head = OPENER if opened else ""
        self._decided = False
        self._closer = StopFinder([CLOSER])
        self._thinking = False
        self._spaces = ""
        self._said = False

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content)"""
        if not self._decided:
            text = self._decide(text)
        if not self._thinking:
            return "", self._answer(text)
        thought = self._closer.feed(text)
        reasoning = self._trim(thought)
        if self._closer.found is None:
            return reasoning, ""
        self._thinking, self._spaces, self._said = False, "", False
        return reasoning, self._answer(self._closer.rest)

    def finish(self) -> tuple[str, str]:
        if not self._decided:
            return "", self._head
        return (self._trim(self._closer.finish()), "") if self._thinking else ("", "")

    def _decide(self, text: str) -> str:
        """Wait until it is clear whether the output begins with a thought; returns what comes behind the opener."""
        self._head += text
        body = self._head.lstrip()
        if len(body) < len(OPENER) and OPENER.startswith(body):
            return ""
        self._decided = True
        self._thinking = body.startswith(OPENER)
        self._said = not self._thinking  # an answer without a thought stays as it is
        return body[len(OPENER) :] if self._thinking else self._head

    def _answer(self, text: str) -> str:
        if self._said or not self._decided:
            return text
        text = text.lstrip()
        self._said = bool(text)
        return text

    def _trim(self, text: str) -> str:
        """Hold white space back until text follows; at the start there is none before it."""
        text = self._spaces + text if self._said else text.lstrip()
        body = text.rstrip()
        self._said = self._said or bool(body)
        self._spaces = text[len(body) :]
        return body
