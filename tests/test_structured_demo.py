"""The demo model under a schema and with tools: a real tokenizer and a real chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from convert.cache import ensure_canonical
from convert.demo import demo_model_file
from convert.errors import ConvertError
from tests.conftest import ServerFactory

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "inhabitants": {"type": "integer", "minimum": 0}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_the_demo_model_answers_in_json_and_calls_tools(server_factory: ServerFactory) -> None:
    try:
        folder: Path = ensure_canonical(demo_model_file())
    except ConvertError as error:
        pytest.skip(str(error))
    server = server_factory(folder)

    def chat(text: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        sent = {"messages": messages, "max_tokens": 120, "temperature": 0.7, "seed": 1} | body
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=300)
        assert reply.status_code == 200, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    for seed in range(3):
        choice = chat("Name the capital of France.", response_format=format, seed=seed)
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"city", "inhabitants"}
    tool = {"type": "function", "function": {"name": "look_up_city", "parameters": CITY}}
    choice = chat("Look up Paris.", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    print(call)
    assert choice["finish_reason"] == "tool_calls" and set(json.loads(call["function"]["arguments"])) == {
        "city",
        "inhabitants",
    }
