"""Streams of the OpenAI API: the same text, log-probabilities and usage as the whole reply, in chunks of one shape."""

from __future__ import annotations

from itertools import chain
from typing import Any

import httpx
import pytest

from tests.openai_calls import CONTEXT, HI, complete, events, refused, streamed


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"n": 3}, {"stop": ["ca"]}, {"echo": True, "logprobs": 0}])
def test_a_stream_equals_the_whole_reply(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"prompt": "abcé", "max_tokens": 11} | extra
    whole = {choice["index"]: choice for choice in complete(http, **body)["choices"]}
    parts = streamed(http, "/v1/completions", **body)
    for index, choice in whole.items():
        assert parts[index]["text"] == choice["text"]
        assert parts[index]["finish_reason"] == choice["finish_reason"]
        for column in choice["logprobs"] or {}:
            assert [*chain(*(part[column] for part in parts[index]["logprobs"]))] == choice["logprobs"][column]


def test_chat_chunks(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", messages=HI, max_tokens=14, n=2, logprobs=True, top_logprobs=1)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and "usage" not in chunk
        assert all({"index", "delta", "logprobs", "finish_reason"} == set(choice) for choice in chunk["choices"])
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert "".join(choice["delta"].get("content", "") for choice in own) == "user: hi"
        entries = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == ["<|bos|>", *"user: hi", "<|eos|>"]


def test_usage_in_a_stream(http: httpx.Client) -> None:
    body = {"prompt": "abc", "n": 2, "seed": 1, "max_tokens": 20}
    whole = complete(http, **body)["usage"]
    chunks = events(http, "/v1/completions", stream_options={"include_usage": True}, **body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1])
    chunks = events(http, "/v1/completions", stream_options={"continuous_usage_stats": True}, **body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 40
    assert all(chunk["choices"] for chunk in events(http, "/v1/completions", **body))
    refused(http, stream_options={"include_usage": True})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bad_stream_is_refused_before_it_starts(http: httpx.Client, path: str) -> None:
    long = "x" * (CONTEXT + 1)
    response = http.post(path, json={"stream": True, "prompt": long, "messages": [{"role": "user", "content": long}]})
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"


def test_warnings_come_on_the_last_chunk(http: httpx.Client) -> None:
    assert complete(http, frobnicate=1)["warnings"] == ["frobnicate: unknown field, ignored"]
    options = {"stream_options": {"include_usage": True}}
    chunks = events(http, "/v1/chat/completions", messages=HI, max_tokens=9, frobnicate=1, **options)
    assert [("warnings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 2) + [True, False]
