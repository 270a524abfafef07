"""Structured output, tool calls and thoughts over HTTP: a real tiny model that grammars guide, and a scripted echo."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conftest import LiveServer, start_server
from tests.scripted_server import launch

pytest.importorskip("llguidance")

SAY = [{"role": "user", "content": "say it"}]


@pytest.fixture(scope="module")
def guided(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A real engine with room for tools that are spelt out byte by byte."""
    log = tmp_path_factory.mktemp("guided") / "server.log"
    server = start_server(tiny_model(max_position_embeddings=4096), log, "--page-size", "4")
    server.wait_ready()
    yield server
    assert "Traceback" not in server.output
    assert server.stop() == 0


class Person(BaseModel):
    name: Literal["Ada", "日本"]
    age: Literal[36, 7]
    pets: list[Literal["🐈"]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


TOOLS = [tool("add", a={"enum": [1, 22]}, b={"$ref": "#/$defs/n"}), tool("get_weather", city={"enum": ["Zürich 🐈"]})]
TOOLS[0]["function"]["parameters"]["$defs"] = {"n": {"enum": [3]}}


def post(server: LiveServer, status: int = 200, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    default = {"prompt": "say it"} if path == "/v1/completions" else {"messages": SAY}
    response = httpx.post(server.url + path, json={"max_tokens": 200, "seed": 5} | default | body, timeout=60)
    assert response.status_code == status, response.text
    reply: dict[str, Any] = response.json()
    return reply


def joined(server: LiveServer, **body: Any) -> dict[int, dict[str, Any]]:
    """Per choice: text, thought, finish and calls of a stream, joined by index as clients do."""
    choices: dict[int, dict[str, Any]] = {}
    body = {"messages": SAY, "max_tokens": 200, "seed": 5, "stream": True} | body
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                entry = choices.setdefault(
                    choice["index"], {"content": "", "reasoning": "", "finish": None, "calls": []}
                )
                delta = choice["delta"]
                entry["content"] += delta.get("content") or ""
                entry["reasoning"] += delta.get("reasoning_content") or ""
                assert delta.get("reasoning_content") == delta.get("reasoning")
                entry["finish"] = choice["finish_reason"] or entry["finish"]
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(entry["calls"]):
                        assert call["type"] == "function" and call["id"] and call["function"]["name"]
                        entry["calls"].append({"id": call["id"], **call["function"]})
                    else:
                        assert set(call) == {"index", "function"} and call["index"] == len(entry["calls"]) - 1
                        entry["calls"][-1]["arguments"] += call["function"]["arguments"]
    return choices


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# ---- structured output, with a real engine


def test_the_openai_client_parses_a_model(guided: LiveServer) -> None:
    with client(guided) as api:
        reply = api.chat.completions.parse(
            model=httpx.get(f"{guided.url}/v1/models").json()["data"][0]["id"],
            messages=[{"role": "user", "content": "who?"}],
            response_format=Person,
            max_tokens=300,
            seed=1,
            temperature=0.5,
        )
    person = reply.choices[0].message.parsed
    assert person is not None and person.age in (36, 7) and reply.choices[0].finish_reason == "stop"


SCHEMA = {"type": "object", "properties": {"x": {"enum": ["y"]}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, r'\{"x":"y"\}'),
        ({"structured_outputs": {"regex": "[a-c]{3}/\n?é"}}, "[a-c]{3}/\n?é"),
        ({"structured_outputs": {"choice": ["🐈", "日本"]}}, "🐈|日本"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, "ab|ac"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[x-z]/'}}, "a[x-z]"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_json": SCHEMA}, None),
        ({"guided_regex": "q{2}"}, "qq"),
        ({"guided_grammar": 'root ::= "hi"'}, "hi"),
    ],
)  # fmt: skip
def test_every_way_to_ask(guided: LiveServer, wish: dict[str, Any], pattern: str | None) -> None:
    for reply in (post(guided, **wish), post(guided, path="/v1/completions", **wish)):
        choice = reply["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, text) if pattern else json.loads(text) == {"x": "y"}


def test_streamed_or_not_the_text_is_the_same_and_a_stop_string_applies_inside(guided: LiveServer) -> None:
    wish: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        "n": 2,
    }
    for stop in ([], ["}"], ['"x"']):
        whole = post(guided, stop=stop, **wish)["choices"]
        stream = joined(guided, stop=stop, **wish)
        assert [c["message"]["content"] for c in whole] == [stream[i]["content"] for i in range(2)]
        assert all(not any(s in c["message"]["content"] for s in stop) and c["finish_reason"] == "stop" for c in whole)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"structural_tag": "x", "regex": "a"}}, "structural_tag"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"json": "{nope"}}, ""),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "nope"),
        ({"structured_outputs": {"json": {"minimum": 5, "maximum": 2, "type": "integer"}}}, "minimum"),
        ({"structured_outputs": {"grammar": "root = what"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"structured_outputs": {"choice": []}}, "choice"),
    ],
)
def test_what_cannot_be_followed_is_400(guided: LiveServer, wish: dict[str, Any], words: str) -> None:
    assert words in post(guided, 400, **wish)["error"]["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 20_000_000_000},
        {"type": "string", "maxLength": 10**9},
        {"enum": [f"value-{i}" for i in range(10_000)]},
    ],
)
def test_large_numbers_in_a_schema(guided: LiveServer, schema: dict[str, Any]) -> None:
    post(guided, max_tokens=2, structured_outputs={"json": schema})


def test_what_explodes_is_refused_and_others_go_on(guided: LiveServer) -> None:
    post(guided, structured_outputs={"regex": "warm"})
    started = time.monotonic()
    error = post(guided, 400, structured_outputs={"regex": "(a{1000}){1000}b"})["error"]
    print(f"refused after {time.monotonic() - started:.2f} s: {error['message']}")
    assert "complex" in error["message"] or "too" in error["message"]
    assert post(guided, structured_outputs={"regex": "ok"})["choices"][0]["message"]["content"] == "ok"


# ---- tools that must be called, with a real engine


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_forced(guided: LiveServer, choice: Any) -> None:
    wish = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
    reply = post(guided, **wish)["choices"][0]
    (call,) = reply["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert reply["message"]["content"] is None and call["type"] == "function"
    assert reply["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    if call["function"]["name"] == "add":
        assert choice == "required" and arguments["a"] in (1, 22) and arguments["b"] == 3
    else:
        assert arguments == {"city": "Zürich 🐈"}
    stream = joined(guided, **wish)[0]
    assert stream["content"] == "" and stream["finish"] == reply["finish_reason"]
    called = [(c["name"], c["arguments"]) for c in stream["calls"]]
    assert called == [(call["function"]["name"], call["function"]["arguments"])]


def test_a_forced_call_that_is_cut_ends_with_length(guided: LiveServer) -> None:
    reply = post(guided, tools=TOOLS, tool_choice="required", max_tokens=2)["choices"][0]
    assert reply["finish_reason"] == "length" and "tool_calls" not in reply["message"]


def test_tool_choice_none_never_calls(guided: LiveServer) -> None:
    reply = post(guided, tools=TOOLS, tool_choice="none", max_tokens=1)["choices"][0]
    assert "tool_calls" not in reply["message"] and reply["finish_reason"] in ("length", "stop")


def test_the_openai_client_gets_parsed_arguments(guided: LiveServer) -> None:
    class GetWeather(BaseModel):
        city: Literal["Zürich"]

    with (
        client(guided) as api,
        api.chat.completions.stream(
            model=httpx.get(f"{guided.url}/v1/models").json()["data"][0]["id"],
            messages=[{"role": "user", "content": "rain?"}],
            tools=[openai.pydantic_function_tool(GetWeather)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
        ) as stream,
    ):
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "gone"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": [tool("a b")]}, "pattern"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude"),
    ],
)
def test_tools_that_make_no_sense_are_400(guided: LiveServer, wish: dict[str, Any], words: str) -> None:
    assert words in post(guided, 400, **wish)["error"]["message"]


# ---- calls and thoughts that the model writes by itself: the scripted engine says what the user said


@pytest.fixture(scope="module")
def echo(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("echo") / "server.log"
    server = launch(tiny_model(), log, "--tool-parser", "hermes", "--reasoning-parser", "think")
    server.wait_ready()
    yield server
    assert "Traceback" not in server.output
    assert server.stop() == 0


def saying(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CALL_A = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALL_B = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🐈"}}\n</tool_call>'


def test_two_calls_with_text_before(echo: LiveServer) -> None:
    wish: dict[str, Any] = {"messages": saying(f"sure\n{CALL_A}\n{CALL_B}"), "tools": TOOLS, "max_tokens": 300}
    reply = post(echo, **wish)["choices"][0]
    calls = reply["message"]["tool_calls"]
    assert reply["message"]["content"] == "user: sure" and reply["finish_reason"] == "tool_calls"
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "get_weather", "arguments": '{"city": "Zürich 🐈"}'},
    ]
    assert len({call["id"] for call in calls}) == 2
    stream = joined(echo, **wish)[0]
    assert stream["content"] == "user: sure" and stream["finish"] == "tool_calls"
    assert [{"name": c["name"], "arguments": c["arguments"]} for c in stream["calls"]] == [c["function"] for c in calls]


def test_a_call_that_is_cut_is_an_answer_in_every_api(echo: LiveServer) -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    wish: dict[str, Any] = {"messages": saying(CALL_A), "tools": [tool], "max_tokens": len(f"user: {CALL_A}") - 18}
    reply = post(echo, path="/v1/messages", **wish)
    assert reply["stop_reason"] == "max_tokens"
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
    assert reply["content"][1]["input"] == {} and reply["content"][1]["name"] == "add"


def test_only_one_call_where_only_one_is_wanted(echo: LiveServer) -> None:
    reply = post(echo, messages=saying(CALL_A + CALL_B), tools=TOOLS, parallel_tool_calls=False, max_tokens=300)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and reply["choices"][0]["finish_reason"] == "tool_calls"
    assert reply["usage"]["completion_tokens"] < len(f"user: {CALL_A}".encode()) + 5, "what follows is not computed"


def test_without_tools_markup_is_content(echo: LiveServer) -> None:
    wishes: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for wish in wishes:
        reply = post(echo, messages=saying(CALL_A), max_tokens=300, **wish)["choices"][0]
        assert reply["message"]["content"] == f"user: {CALL_A}" and "tool_calls" not in reply["message"]


def test_a_conversation_with_calls_and_answers_goes_back_in(echo: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [*SAY, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "call_1", "content": "3"}]  # fmt: skip
    post(echo, messages=turns, tools=TOOLS)
    call["function"]["arguments"] = "{nope"  # type: ignore[index]
    assert "not JSON" in post(echo, 400, messages=turns)["error"]["message"]


def test_a_choice_that_has_said_enough_stops_computing(echo: LiveServer) -> None:
    """n choices that end with a stop string or go on are told to the engine one by one."""
    reply = post(echo, messages=saying("abc"), stop=["b"], n=3)
    assert [c["message"]["content"] for c in reply["choices"]] == ["user: a"] * 3


@pytest.fixture(scope="module")
def thinking(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A template that begins the thought itself, and a prompt of nothing but the user's words."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    folder.mkdir()
    for file in tiny_model().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}<|eos|>{# </think> #}{% if add_generation_prompt %}<think>{% endif %}"
    )
    server = launch(folder, folder.parent / "server.log")
    server.wait_ready()
    yield server
    assert server.stop() == 0


def test_a_thought_that_the_prompt_began(thinking: LiveServer) -> None:
    wish: dict[str, Any] = {"messages": saying("\nhm 🐈\n</think>\n\nYes.")}
    message = post(thinking, **wish)["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm 🐈" and message["content"] == "Yes."
    stream = joined(thinking, **wish)[0]
    assert (stream["reasoning"], stream["content"]) == ("hm 🐈", "Yes.")


def test_a_thought_that_the_model_began(echo: LiveServer, thinking: LiveServer) -> None:
    reply = post(thinking, messages=saying("<think>a</think>b"), add_generation_prompt=False)["choices"][0]
    assert reply["message"]["reasoning"] == "a" and reply["message"]["content"] == "b"
    assert "reasoning" not in post(echo, messages=saying("no thought"))["choices"][0]["message"]
