"""Calls of the OpenAI API for tests: each checks what every reply must be, and returns what this one is.

Knows no engine; `http` is a client whose base is the server.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

CONTEXT = 512
HI = [{"role": "user", "content": "hi"}]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": "abc"} | body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 8} | body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def refused(http: httpx.Client, path: str = "/v1/completions", status: int = 400, **body: Any) -> dict[str, Any]:
    default: dict[str, Any] = {"prompt": "abc"} if path == "/v1/completions" else {"messages": HI}
    response = http.post(path, json=default | body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """A strict reader: bytes, cut at blank lines, one data line with one JSON object each, [DONE] once and last."""
    response = http.post(path, json={"stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.split(b"\n\n")
    assert blocks.pop() == b"" and blocks.pop() == b"data: [DONE]"
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def streamed(http: httpx.Client, path: str, **body: Any) -> dict[int, dict[str, Any]]:
    """Per choice: the joined text, the finish reason and the joined log-probabilities."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events(http, path, **body):
        for choice in event["choices"]:
            entry = choices.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": []})
            assert entry["finish_reason"] is None, "nothing comes after the end of a choice"
            entry["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            entry["finish_reason"] = choice["finish_reason"]
            entry["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
    return choices
