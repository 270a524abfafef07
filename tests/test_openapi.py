"""/openapi.json against what a real server takes and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from server.openapi import EXAMPLES
from server.reply_schemas import CHUNKS, REPLIES
from tests.conftest import LiveServer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(live_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server.url, timeout=60) as client:
        yield client


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "temperature" in schemas["ChatBody"]["properties"] and "echo" in schemas["CompletionBody"]["properties"]
    assert "kv_cache" in schemas["Usage"]["properties"] and "delta" in schemas["ChatDelta"]["properties"]


def check_shape(adapter: TypeAdapter[Any], reply: Any) -> None:
    """Every field is described, none is missing, and none comes that the schema does not name."""
    adapter.validate_json(json.dumps(reply), strict=True)


def test_openapi_examples_and_replies_are_what_it_says(http: httpx.Client) -> None:
    every = {"logprobs": 2, "prompt_logprobs": 1, "kv_usage": True, "stop": ["zz"], "n": 2, "no_such_field": 1}
    chat = {"messages": HI, "max_tokens": 8}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3} | every),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "stop": "b"}),
        ("/v1/chat/completions", chat | every | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 5, "instructions": "be short"}),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/embeddings", {"input": ["a", "b"], "no_such_field": 1}),
        ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("/detokenize", {"tokens": [72]}),
    ]
    for path, body in asks:
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        check_shape(REPLIES[path], reply.json())
    models = http.get("/v1/models").json()
    check_shape(REPLIES["/v1/models"], models)
    check_shape(REPLIES["/v1/models/{name}"], http.get(f"/v1/models/{models['data'][0]['id']}").json())


@pytest.mark.parametrize(
    "usage", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_every_event_of_a_stream_is_what_openapi_says(http: httpx.Client, usage: dict[str, bool]) -> None:
    options: dict[str, Any] = {"stream": True, "max_tokens": 8, "no_such_field": 1}
    options |= {"stream_options": usage} if usage else {}
    asks: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "abc", "logprobs": 1},
        "/v1/chat/completions": {"messages": HI, "logprobs": True},
    }
    for path, body in asks.items():
        lines = http.post(path, json=options | body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events  # how many depends on how many tokens were ready at once
        for event in events:
            check_shape(CHUNKS[path], event)


def test_examples_are_what_the_schema_says() -> None:
    for path in EXAMPLES.keys() & REPLIES.keys():
        check_shape(REPLIES[path], EXAMPLES[path])
