"""/v1/responses and /v1/messages, streamed and not: translation both ways, with an engine that repeats its prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from server.messages_body import MessagesBody
from server.messages_reply import Blocks
from server.responses_body import ResponsesBody
from server.responses_reply import Output
from tests.conftest import LiveServer
from tests.scripted_engine import ERROR

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi", "max_output_tokens": 14},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 14},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=ASK[path] | body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Each event is its type's name and one JSON object; nothing else is on the wire."""
    response = http.post(path, json=ASK[path] | {"stream": True} | body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# ---- responses


def test_a_response(http: httpx.Client) -> None:
    reply = ask(http, RESPONSES)
    assert reply["object"] == "response" and reply["status"] == "completed" and reply["id"].startswith("resp_")
    [item] = reply["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "user: hi", "annotations": [], "logprobs": []}]
    assert reply["usage"]["input_tokens_details"] == {"cached_tokens": 2} and reply["usage"]["output_tokens"] == 10
    cut = ask(http, RESPONSES, max_output_tokens=3)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_events_of_a_response_build_it(http: httpx.Client) -> None:
    found = events(http, RESPONSES)
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in found))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "".join(event.get("delta", "") for event in found) == "user: hi"
    whole, last = ask(http, RESPONSES), found[-1]["response"]
    unlike = {"id", "created_at", "timings", "output"}
    assert {k: v for k, v in last.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    assert last["output"][0]["content"] == whole["output"][0]["content"] and "timings" in last


def test_what_a_response_says_to_the_model(http: httpx.Client) -> None:
    """The engine repeats the prompt, so the answer shows it."""
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "three"},
    ]
    reply = ask(http, RESPONSES, input=turns, instructions="be brief", ignore_eos=True, max_output_tokens=80)
    text = reply["output"][0]["content"][0]["text"]
    assert text.startswith("system: be brief\nuser: one\nassistant: two\nuser: three\nassistant: ")


def test_a_conversation_of_mixed_items_leaves_the_log_clean(http: httpx.Client, repeater: LiveServer) -> None:
    before = len(repeater.output)
    ask(http, RESPONSES, input=[{"type": "function_call_output", "call_id": "c1", "output": "2"}])
    assert "Warning" not in repeater.output[before:]


def test_calls_and_formats_become_those_of_chat() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = ResponsesBody.model_validate(
        {
            "input": [
                {"role": "user", "content": "1+1?"},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "add"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "top_k": 5,
        }
    )
    chat = body.as_chat().model_dump(exclude_none=True)
    assert [call["id"] for call in chat["messages"][1]["tool_calls"]] == ["c1", "c2"]
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert chat["tools"][0]["function"]["name"] == "add" and chat["top_k"] == 5
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_output_items_of_reasoning_text_and_calls() -> None:
    output = Output()
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"content": "so "},
        {"content": "it is"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "sub", "arguments": "{}"}}]},
    ]
    found = [event for delta in deltas for event in output.feed(delta, [])] + output.close()
    shown = [item.shown("completed") for item in output.items]
    assert [item["type"] for item in shown] == ["reasoning", "message", "function_call", "function_call"]
    assert shown[1]["content"][0]["text"] == "so it is" and shown[2]["arguments"] == '{"a":1}'
    assert [item["call_id"] for item in shown[2:]] == ["c1", "c2"]
    added = [event["output_index"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert added == [0, 1, 2, 3] and done == shown
    whole = Output()
    whole.feed({"content": "so it is", "tool_calls": [CALL, CALL | {"id": "c2"}]}, [])
    assert [item.call_id for item in whole.items] == ["", "call_1", "c2"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("truncation", "auto"),
        ("n", 2),
        ("temperature", -1),
        ("input", []),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "computer_call"}]),
        ("tools", [{"type": "web_search"}]),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, field: str, value: Any) -> None:
    response = http.post(RESPONSES, json=ASK[RESPONSES] | {field: value})
    assert response.status_code == 400 and field in response.json()["error"]["message"], response.text


def test_openai_client_reads_responses(repeater: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{repeater.url}/v1", api_key="none", max_retries=0)
    assert client.responses.create(model="m", input="hi", max_output_tokens=14).output_text == "user: hi"
    with client.responses.stream(model="m", input="hi", max_output_tokens=14) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "user: hi"
        assert stream.get_final_response().output_text == "user: hi"


# ---- messages


def test_a_message(http: httpx.Client) -> None:
    reply = ask(http, MESSAGES)
    assert reply["type"] == "message" and reply["role"] == "assistant" and reply["id"].startswith("msg_")
    assert reply["content"] == [{"type": "text", "text": "user: hi"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    usage = reply["usage"]
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 10)
    counted = http.post(f"{MESSAGES}/count_tokens", json={"messages": ASK[MESSAGES]["messages"]}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + 2}
    stopped = ask(http, MESSAGES, stop_sequences=["r:"])
    assert stopped["content"][0]["text"] == "use"
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "r:")
    assert ask(http, MESSAGES, max_tokens=2)["stop_reason"] == "max_tokens"


def test_the_events_of_a_message_build_it(http: httpx.Client) -> None:
    found = events(http, MESSAGES)
    kinds = list(dict.fromkeys(event["type"] for event in found))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
    whole = ask(http, MESSAGES)
    assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    text = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"] == whole["usage"]


def test_a_last_turn_of_the_assistant_is_continued(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    reply = ask(
        http, MESSAGES, messages=turns, system=[{"type": "text", "text": "sys"}], ignore_eos=True, max_tokens=60
    )
    assert reply["content"][0]["text"].startswith("system: sys\nuser: hi\nassistant: So system: sys")


def test_tool_blocks_become_turns_of_chat() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    body = MessagesBody.model_validate(
        {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}, use]},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            ],
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    )
    chat = body.as_chat().model_dump(exclude_none=True)
    assert [turn["role"] for turn in chat["messages"]] == ["user", "assistant", "tool", "user"]
    assert json.loads(chat["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert chat["messages"][2]["content"] == "2" and chat["tool_choice"] == "required"
    assert chat["parallel_tool_calls"] is False


def test_blocks_of_thinking_text_and_tool_use() -> None:
    blocks = Blocks()
    start = {"index": 0, "id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"content": "so"},
        {"tool_calls": [start]},
        {"tool_calls": [rest]},
    ]
    found = [event for delta in deltas for event in blocks.feed(delta)] + blocks.close()
    assert [(event["type"], event["index"]) for event in found if "delta" not in event["type"]] == [
        (f"content_block_{edge}", index) for index in range(3) for edge in ("start", "stop")
    ]
    assert blocks.shown() == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    ]


def test_errors_have_anthropics_shape(http: httpx.Client) -> None:
    for body, kind, status in (
        ({"max_tokens": 0}, "invalid_request_error", 400),
        ({"model": "claude"}, "not_found_error", 404),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_request_error", 400),
        ({"seed": ERROR}, "api_error", 500),
    ):
        response = http.post(MESSAGES, json=ASK[MESSAGES] | body)
        assert response.status_code == status, response.text
        error = response.json()
        assert error["type"] == "error" and error["error"]["type"] == kind and error["error"]["message"]
    assert events(http, MESSAGES, seed=ERROR)[-1]["error"]["type"] == "api_error"
    assert events(http, RESPONSES, seed=ERROR)[-1]["type"] == "error"
