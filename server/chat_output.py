"""How a chat's output is shaped: tools in the prompt, the grammar, and the parser that takes the text apart.

Knows request bodies and what the chat template shows; knows no engine and no reply format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from server import reasoning
from server.constraints import lark_part, spec_of, with_spacing
from server.engine.messages import GrammarSpec
from server.errors import bad_request
from server.output_parser import OutputParser
from server.output_schemas import NamedChoice
from server.reasoning import ReasoningSplitter
from server.schemas import ChatBody, GenerationBody
from server.token_bytes import TokenBytes
from server.tool_calls import ToolParser
from server.tool_formats import FORMATS, MARKERS, ToolFormat, detect, forced_calls, plain_messages


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """What a model is taken to write, by its chat template or by flags. tools None: no format is known."""

    tools: ToolFormat | None
    thinks: bool

    @classmethod
    def of(cls, template: str, tool_parser: str, reasoning_parser: str) -> OutputStyle:
        tools = detect(template) if tool_parser == "auto" else FORMATS.get(tool_parser)
        thinks = reasoning.thinks(template) if reasoning_parser == "auto" else reasoning_parser == "think"
        return cls(tools, thinks)


class ChatOutput:
    """One chat request's wishes. ApiError 400 for those that this model cannot meet."""

    def __init__(self, body: ChatBody, style: OutputStyle, vocabulary: TokenBytes) -> None:
        self._body, self._style = body, style
        self._functions = body.offered
        self._special = {
            text: token
            for token in vocabulary.special
            if (text := vocabulary.label(token)) in (*MARKERS, *reasoning.MARKERS)
        }
        if self._functions and style.tools is None:
            raise bad_request(
                "tools: this model's chat template shows no format of tool calls that is known here; "
                f"the operator can name one with --tool-parser {'|'.join(FORMATS)}",
                "tools",
            )

    def messages(self) -> list[dict[str, Any]]:
        """As the template wants them; one that knows no tools gets plain texts."""
        messages = [message.as_dict() for message in self._body.messages]
        if self._style.tools is not None and not self._style.tools.in_template:
            return plain_messages(messages, self._functions)
        return messages

    def variables(self) -> dict[str, Any]:
        if not self._functions:
            return {}
        return {"tools": [{"type": "function", "function": function} for function in self._functions]}

    def parser(self, rendered: str) -> Callable[[], OutputParser] | None:
        """Makes the parser of one choice; None where text is content, whatever it says."""
        if not self._functions and not self._style.thinks:
            return None
        return partial(self._make_parser, reasoning.is_open(rendered))

    def _make_parser(self, opened: bool) -> OutputParser:
        tools = None
        if self._functions and self._style.tools is not None:
            offered = frozenset(function["name"] for function in self._functions)
            tools = ToolParser(self._style.tools, offered, self._parallel)
        return OutputParser(ReasoningSplitter(opened) if self._style.thinks else None, tools)

    @property
    def _parallel(self) -> bool:
        return self._body.parallel_tool_calls is not False and not self.is_named

    @property
    def is_named(self) -> bool:
        """One function was forced by name: OpenAI then reports stop rather than tool_calls."""
        return isinstance(self._body.tool_choice, NamedChoice)

    def shown_tokens(self) -> frozenset[int]:
        """Control tokens that the parser has to see as text."""
        return frozenset(self._special.values())

    def grammar(self, rendered: str) -> tuple[str, GrammarSpec] | None:
        """(the field that asks, the grammar): a forced call, else the shape that was asked for, or a free call."""
        shape = shape_of(self._body)
        thought_end = None
        if self._style.thinks and reasoning.is_open(rendered):
            marker = reasoning.CLOSER
            thought_end = f"<[{self._special[marker]}]>" if marker in self._special else json.dumps(marker)
        if self._body.must_call:
            if shape is not None:
                raise bad_request(f"{shape[0]} and a tool_choice that forces a call exclude each other", shape[0])
            return "tools", spec_of("tools", self._calls(), thought_end=thought_end)
        if shape is None:
            return None
        alternatives = [shape[1], self._calls()] if self._functions else [shape[1]]
        return shape[0], spec_of(shape[0], *alternatives, thought_end=thought_end)

    def _calls(self) -> dict[str, Any]:
        format = self._style.tools
        assert format is not None
        spaced = [function | {"parameters": with_spacing(function["parameters"])} for function in self._functions]
        return lark_part(forced_calls(format, spaced, self._parallel, self._special))


def shape_of(body: GenerationBody) -> tuple[str, Any] | None:
    try:
        return body.shape()
    except ValueError as error:
        raise bad_request(str(error)) from None


def completion_grammar(body: GenerationBody) -> tuple[str, GrammarSpec] | None:
    shape = shape_of(body)
    return None if shape is None else (shape[0], spec_of(shape[0], shape[1]))
