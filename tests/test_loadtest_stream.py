"""Streams read whole, cut anywhere and byte by byte; and what a server may get wrong in them."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from server.loadtest.record import Record
from server.loadtest.stream import CompletionReply, spread

SSE = {"content-type": "text/event-stream; charset=utf-8"}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(text: str, reason: str | None = None, count: int | None = None) -> bytes:
    made: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return event(made | ({"usage": {"prompt_tokens": 7, "completion_tokens": count}} if count is not None else {}))


FINAL = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = event(b"[DONE]")
WHOLE = chunk("Hé") + b": a comment\n\n" + chunk(" wörld", None) + chunk("!", "stop") + FINAL + DONE


def read(pieces: list[bytes], status: int = 200, headers: dict[str, str] | None = None) -> Record:
    record = Record(0, 0.0, sent=0.0)
    reply = CompletionReply(record, keep_text=True)
    reply.on_head(status, SSE if headers is None else headers, 0.0)
    for number, piece in enumerate(pieces):
        reply.on_body(piece, float(number))
    reply.on_end(float(len(pieces)))
    reply.settle()
    return record


def cuts(size: int) -> list[bytes]:
    return [WHOLE[start : start + size] for start in range(0, len(WHOLE), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_cuts_change_nothing(size: int, newline: bytes) -> None:
    record = read([piece.replace(b"\n", newline) for piece in cuts(size)])
    assert (record.ok, record.text, record.finish_reason) == (True, "Hé wörld!", "stop")
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 4)
    assert (sum(record.chunk_tokens), len(record.chunk_times)) == (5, 3)
    assert record.token_source == "usage, spread by characters"


def test_counts_in_every_chunk_are_taken_as_they_are() -> None:
    record = read([chunk("a", None, 3), chunk("", None, 4), chunk("bc", "stop", 9), DONE])
    assert list(record.chunk_tokens) == [3, 1, 5]
    assert list(record.chunk_times) == [0.0, 1.0, 2.0]
    assert record.token_source == "usage per chunk"


def test_a_chunk_without_text_or_count_is_no_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    word = event({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    record = read([role, word, end, DONE])
    assert list(record.chunk_times) == [1.0]
    assert (record.tokens, record.token_source) == (1, "chunks")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "content"])
def test_reasoning_is_output(name: str) -> None:
    assert read([event({"choices": [{"delta": {name: "hm"}, "finish_reason": "stop"}]}), DONE]).text == "hm"


def test_tool_calls_are_output() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    assert read([event({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}), DONE]).ok


@pytest.mark.parametrize(
    ("pieces", "kind", "detail"),
    [
        ([chunk("a"), event({"error": {"message": "out of pages"}}), DONE], "stream_error", "out of pages"),
        ([chunk("a"), event({"error": "plain words"}), DONE], "stream_error", "plain words"),
        ([chunk("a"), event(b"<html>")], "non_json", "<html>"),
        ([chunk("a"), event(b"[1, 2]")], "non_json", "[1, 2]"),
        ([chunk("a")], "truncated", "finish_reason"),
        ([DONE], "empty", "token"),
        ([], "truncated", "finish_reason"),
    ],
)
def test_faults_inside_a_200_stream(pieces: list[bytes], kind: str, detail: str) -> None:
    record = read(pieces)
    assert record.error == kind
    assert detail in record.detail


def test_a_missing_done_after_a_finish_reason_is_noted_only() -> None:
    record = read([chunk("a", "stop")])
    assert (record.ok, record.missing_done) == (True, True)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, b'{"error":{"message":"queue full"}}', "http_4xx"),
        (503, b"upstream gone", "http_5xx"),
        (200, b'{"choices":[{"text":"all at once"}]}', "not_a_stream"),
        (200, b"<html>hello</html>", "non_json"),
    ],
)
def test_replies_that_are_no_stream(status: int, body: bytes, kind: str) -> None:
    record = read([body], status, {"content-type": "application/json"})
    assert (record.error, record.status) == (kind, status)


@pytest.mark.parametrize(("tokens", "widths"), [(5, [2, 6, 1]), (3, [9, 9, 9]), (2, [1, 1, 1, 1]), (100, [1, 0, 3])])
def test_spread_gives_out_every_token(tokens: int, widths: list[int]) -> None:
    shares = spread(tokens, array("I", widths))
    assert (sum(shares), len(shares)) == (tokens, len(widths))
