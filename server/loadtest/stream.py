"""Reads one completion stream (server-sent events) into a Record.

Knows the OpenAI shapes of `/v1/completions` and `/v1/chat/completions`, not sockets and not statistics.
Never raises on what a server sends: a fault becomes the record's error kind.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

from server.loadtest.record import Record

MAX_PENDING = 1 << 24
DECODER = json.JSONDecoder()


class CompletionReply:
    """The reply of one streamed request; times are those of the read that brought the bytes."""

    def __init__(self, record: Record, keep_text: bool = False) -> None:
        self.record = record
        self._keep_text = keep_text
        self._pending = b""
        self._lines: list[bytes] = []
        self._event_stream = False
        self._done = False
        self._counted = 0
        self._counts_every_chunk = True
        self._widths = array("I")

    def on_head(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.record.status = status
        self._event_stream = status == 200 and "text/event-stream" in headers.get("content-type", "")

    def on_body(self, data: bytes, now: float) -> None:
        if not self._event_stream:
            self._pending = (self._pending + data)[:65536]
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"), now)
        if len(self._pending) > MAX_PENDING:
            self.record.fail("non_json", f"an event of more than {MAX_PENDING} bytes")
            self._pending = b""

    def on_end(self, now: float) -> None:
        """The body ended as HTTP says it should; whether the completion did is decided here."""
        record = self.record
        if not self._event_stream:
            self._plain_body()
        elif not self._done:
            self._dispatch(now)
            if not record.finish_reason:
                record.fail("truncated", "the stream ended without a finish_reason and without [DONE]")
            record.missing_done = True
        if record.ok and not record.chunk_times:
            record.fail("empty", "a 200 stream without a single token")

    def settle(self) -> None:
        """Call once when nothing more will come: gives each chunk its number of tokens."""
        record = self.record
        if not record.chunk_times:
            return
        if record.completion_tokens is None:
            record.token_source = "chunks"
        elif self._counts_every_chunk and sum(record.chunk_tokens) == record.completion_tokens:
            record.token_source = "usage per chunk"
        else:
            record.chunk_tokens = spread(record.completion_tokens, self._widths)
            record.token_source = "usage, spread by characters"

    def _plain_body(self) -> None:
        record, message = self.record, error_text(self._pending)
        if record.status >= 500:
            record.fail("http_5xx", f"{record.status}: {message}")
        elif record.status != 200:
            record.fail("http_4xx", f"{record.status}: {message}")
        elif not parsed(self._pending):
            record.fail("non_json", f"200 with a body that is neither events nor JSON: {message}")
        else:
            record.fail("not_a_stream", f"200 without an event stream: {message}")

    def _line(self, line: bytes, now: float) -> None:
        if line.startswith(b"data:"):
            self._lines.append(line[5:].lstrip(b" "))
        elif not line:
            self._dispatch(now)

    def _dispatch(self, now: float) -> None:
        if not self._lines:
            return
        payload = b"\n".join(self._lines)
        self._lines.clear()
        if payload == b"[DONE]":
            self._done = True
            return
        event = parsed(payload)
        if event is None:
            self.record.fail("non_json", f"an event that is not a JSON object: {payload[:120]!r}")
        elif "error" in event:
            self.record.fail("stream_error", error_text(payload))
        else:
            self._chunk(event, now)

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        counted = self._usage(event.get("usage"))
        text = ""
        for choice in event.get("choices") or ():
            text += delta_text(choice)
            if choice.get("finish_reason"):
                self.record.finish_reason = choice["finish_reason"]
        if not event.get("choices"):
            return  # the usage event of the end: no token came with it
        if text or counted:
            self.record.chunk_times.append(now)
            self.record.chunk_tokens.append(1 if counted is None else counted)
            self._counts_every_chunk &= counted is not None
            self._widths.append(len(text))
            if self._keep_text:
                self.record.text += text

    def _usage(self, usage: Any) -> int | None:
        """Tokens new since the last count, or None where the event carries no count."""
        if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
            return None
        record, before = self.record, self._counted
        self._counted = record.completion_tokens = usage["completion_tokens"]
        record.prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = details.get("cached_tokens")
        return max(0, self._counted - before)


def delta_text(choice: dict[str, Any]) -> str:
    """The new text of one choice, whichever of the known fields carries it (tool calls included)."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def spread(tokens: int, widths: array[int]) -> array[int]:
    """`tokens` shared over chunks in proportion to their characters (each rounded so that the sum is exact)."""
    weights = [max(1, width) for width in widths]
    if tokens == len(weights):
        return array("I", [1] * tokens)
    total, seen, given = sum(weights), 0, 0
    shares = array("I")
    for weight in weights:
        seen += weight
        upto = round(tokens * seen / total)
        shares.append(upto - given)
        given = upto
    return shares


def parsed(payload: bytes) -> dict[str, Any] | None:
    try:
        value = DECODER.decode(payload.decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def error_text(body: bytes) -> str:
    """The message of an OpenAI error object, or the beginning of whatever came instead."""
    error = (parsed(body) or {}).get("error")
    if isinstance(error, dict):
        return str(error.get("message", error))[:300]
    return str(error)[:300] if error else body[:120].decode("utf-8", "replace").strip()
