"""Tool calls and thoughts in a model's text, fed whole, in two parts, and a character at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.output_parser import OutputParser
from server.reasoning import ReasoningSplitter
from server.tool_calls import Parsed, ToolParser
from server.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, SMOLLM2, ToolFormat, detect

OFFERED = frozenset(["add", "get_weather"])
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"{"}]}}'
ADDED = ("add", '{"a": 1, "b": [2, {"c": "}\\"{"}]}')
WEATHER = '{"name": "get_weather", "arguments": {"city": "Zürich 🐈"}}'
RAINED = ("get_weather", '{"city": "Zürich 🐈"}')


def collect(parser: OutputParser | ToolParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls), with the rules of deltas checked: names and ids once, indices in order."""
    parts: list[Parsed] = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    calls: list[list[str]] = []
    ids = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.index == len(calls):
            assert delta.id and delta.name
            ids.append(delta.id)
            calls.append([delta.name, ""])
        else:
            assert delta.index == len(calls) - 1 and delta.id is None and delta.name is None and delta.arguments
        calls[-1][1] += delta.arguments
    assert len(set(ids)) == len(ids)
    content, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]


def parsed(format: ToolFormat, text: str, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """The one result of every way to cut the text."""
    results = [collect(ToolParser(format, OFFERED, parallel), pieces) for pieces in cuts(text)]
    assert all(result == results[0] for result in results)
    return results[0][0], results[0][2]


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
        (HERMES, f"<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", "", [ADDED, RAINED]),
        (HERMES, f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.", [RAINED]),
        (HERMES, f"<tool_call>{ADD}</tool_call>\n\nDone. ", "\n\nDone.", [ADDED]),
        (HERMES, f"<tool_call>{ADD}\n<tool_call>{WEATHER}", "", [ADDED, RAINED]),
        (SMOLLM2, f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", [ADDED, RAINED]),
        (LLAMA3, ADD.replace("arguments", "parameters"), "", [ADDED]),
        (LLAMA3, f"<|python_tag|>{ADD}; {WEATHER}", "", [ADDED, RAINED]),
        (MISTRAL, f"[TOOL_CALLS][{ADD}, {WEATHER}]", "", [ADDED, RAINED]),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}]", "", [ADDED]),
        (MISTRAL, 'ok [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{}', "ok",
         [("add", '{"a": 1}'), ("get_weather", "{}")]),
    ],
)  # fmt: skip
def test_calls(format: ToolFormat, text: str, content: str, calls: list[Any]) -> None:
    assert parsed(format, text) == (content, calls)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add"}', "{}"),
        ('{"name": "add", "arguments": null}', "{}"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{ "type": "function", "name" : "add" , "parameters" : {"a":\n1} }', '{"a":\n1}'),
        ('{"name": "add", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
    ],
)
def test_arguments_in_every_order_and_form(body: str, arguments: str) -> None:
    assert parsed(HERMES, f"<tool_call>{body}</tool_call>") == ("", [("add", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "plain words, a < b, <tool and </tool_call> alone ",
        '<tool_call>{"name": "delete_everything", "arguments": {}}</tool_call>',
        "<tool_call>not json</tool_call>",
        "<tool_call>\n</tool_call> x",
        "ends in the middle of <tool_ca",
        'cut <tool_call>{"name": "ad',
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parsed(HERMES, text) == (text, [])


@pytest.mark.parametrize(
    "text", ['{"answer": 42, "name": "add"}', '  {"x": {"name": "add"}} ', "{", "[1, 2]", "hi {}", '{"name": 3}']
)
def test_json_that_is_an_answer_stays_content_for_llama(text: str) -> None:
    assert parsed(LLAMA3, text) == (text, [])


def test_a_call_that_is_cut_keeps_what_went_out() -> None:
    assert parsed(HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1') == ("", [("add", '{"a": 1')])
    parser = ToolParser(HERMES, OFFERED)
    collect(parser, ['<tool_call>{"name": "add", "arguments": {"a": 1'])
    assert parser.completed == 0


def test_arguments_go_out_as_they_come() -> None:
    parser = ToolParser(HERMES, OFFERED)
    seen = [[delta.arguments for delta in parser.feed(char).calls] for char in f"<tool_call>{ADD}"]
    assert sum(bool(deltas) for deltas in seen) > 20


def test_one_call_is_the_last_where_only_one_is_wanted() -> None:
    text = f"<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    assert parsed(HERMES, text, parallel=False) == ("", [ADDED])


@given(st.text('<>/tolcaTOLS[]{}":, \nadd_', max_size=60), st.sampled_from(sorted(FORMATS)))
def test_any_text_reads_alike_however_it_is_cut(text: str, name: str) -> None:
    parsed(FORMATS[name], text)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm, 2 < 3\n</think>\n\nYes. ", "hm, 2 < 3", "Yes. "),
        (True, "hm </thin </think>ok", "hm </thin", "ok"),
        (True, "still thinking ", "still thinking", ""),
        (False, " an answer <think>x</think>", "", " an answer <think>x</think>"),
        (False, "<thi", "", "<thi"),
        (False, "<think></think>a", "", "a"),
        (False, "", "", ""),
    ],
)
def test_thoughts(opened: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        parser = OutputParser(ReasoningSplitter(opened), None)
        assert collect(parser, pieces) == (content, reasoning, [])


def test_a_thought_before_a_call() -> None:
    text = f"<think>\nI could <tool_call>\n</think>\n\n<tool_call>\n{ADD}\n</tool_call>"
    for pieces in cuts(text):
        parser = OutputParser(ReasoningSplitter(False), ToolParser(HERMES, OFFERED))
        assert collect(parser, pieces) == ("", "I could <tool_call>", [ADDED])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", SMOLLM2),
        ("{{ tools | tojson }} ... <tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }} <|python_tag|>", LLAMA3),
        ("{{ tools }} <tool_call><function=x>", None),
        ("{{ tools }} <|tool_calls_begin|>", None),
    ],
)
def test_the_template_shows_the_format(template: str, format: ToolFormat | None) -> None:
    assert detect(template) is format


def test_ids_fit_the_templates() -> None:
    assert len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum()
    assert json.dumps(HERMES.new_id()).startswith('"call_')
