"""One tool call, a character at a time: as a JSON object, or as a name with an object of arguments behind it.

Knows no markers and no lists: whoever finds where a call begins makes a reader and feeds it until it is done.
"""

from __future__ import annotations

import json
import re

ARGUMENT_KEYS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENT_KEYS)


class Nesting:
    """How deep in braces and brackets, and whether inside a string."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.in_string = self._escaped = False

    def feed(self, char: str) -> None:
        if self.in_string:
            ends = char == '"' and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self.in_string = not ends
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class CallReader:
    """{"name": ..., "arguments": {...}} in any order, from behind its first brace.

    name is set once it is known and offered; failed: this object is no call of an offered function.
    """

    def __init__(self, offered: frozenset[str]) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._offered = offered
        self._nesting = Nesting(1)
        self._key_text = self._key = self._value = self._early = ""
        self._in_value = self._argued = False

    def feed(self, char: str) -> str:
        """Text of the arguments that is sure by now; it waits for the name."""
        at_top = self._nesting.depth == 1 and not self._nesting.in_string
        self._nesting.feed(char)
        if at_top and char == ":" and not self._in_value:
            self._begin_value()
        elif (at_top and char == ",") or self._nesting.depth == 0:
            self._end_value()
            self._finish_if_closed()
        elif self._in_value:
            self._value += char
            self._extend(char)
        else:
            self._key_text += char
        return self._release()

    def _begin_value(self) -> None:
        key = decoded(self._key_text)
        self._key, self._key_text, self._value, self._in_value = str(key), "", "", True
        if self._key not in KEYS and self.name is None:
            self.failed = True

    def _extend(self, char: str) -> None:
        """Arguments that are an object go out as they come, without the white space around it."""
        is_inside = self._nesting.depth > 1 or char == "}"
        if is_inside and self._key in ARGUMENT_KEYS and self._value.lstrip().startswith("{"):
            self._argued = True
            self._early += char

    def _end_value(self) -> None:
        value = decoded(self._value) if self._in_value and not self._argued_now() else None
        if self._in_value and self._key == "name":
            self.name = value if isinstance(value, str) and value in self._offered else None
            self.failed = self.name is None
        elif self._key in ARGUMENT_KEYS and isinstance(value, str):
            self._argued, self._early = True, value  # an object that was written as a string
        self._in_value, self._key = False, ""

    def _argued_now(self) -> bool:
        return self._key in ARGUMENT_KEYS and self._argued

    def _finish_if_closed(self) -> None:
        if self._nesting.depth:
            return
        self.done = not self.failed and self.name is not None
        self.failed = not self.done
        if not self._argued:
            self._early = "{}"

    def _release(self) -> str:
        if self.name is None:
            return ""
        sure, self._early = self._early, ""
        return sure


class NamedCallReader:
    """name{...}, with [ARGS] between the two and [CALL_ID] and an id before it where a model writes them."""

    def __init__(self, offered: frozenset[str]) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._offered = offered
        self._head = ""
        self._nesting = Nesting(0)

    def feed(self, char: str) -> str:
        if self.name is None and char != "{":
            self._head += char
            self.failed = len(self._head) > 256 or char == "\n"
            return ""
        if self.name is None:
            name = re.split(r"\[CALL_ID\]|\[ARGS\]", self._head)[0].strip()
            self.name = name if name in self._offered else None
            self.failed = self.name is None
        self._nesting.feed(char)
        self.done = self._nesting.depth == 0 and not self._nesting.in_string
        return char


def decoded(text: str) -> object:
    """The JSON value, or None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
