"""Bodies of POST /v1/messages (Anthropic's API), and the chat each one asks for.

Knows nothing of replies.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.as_chat import chat_body, function_call, function_tool
from server.body import Body
from server.schemas import MAX_STOPS, ChatBody, Stop, text_or_list


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Accepted as clients send it back, and left out: templates drop the reasoning of earlier turns."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextBlocks = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("list")], Discriminator(text_or_list)
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[list[Block], Tag("list")], Discriminator(text_or_list)]

    def as_chat(self) -> list[dict[str, Any]]:
        """Results of tools are turns of their own and come before what the user says with them."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        uses = [block for block in self.content if isinstance(block, ToolUseBlock)]
        text = "\n".join(block.text for block in self.content if isinstance(block, TextBlock))
        turns: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)} for block in results
        ]
        calls = [function_call(use.id, use.name, json.dumps(use.input, ensure_ascii=False)) for use in uses]
        if text or calls or not results:
            turns.append({"role": self.role, "content": text} | ({"tool_calls": calls} if calls else {}))
        return turns


def text_of(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


class Tool(Body):
    """A tool that the client runs; the vendor's own (web search, bash, ...) are refused by their type."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


EXAMPLE: Any = {"max_tokens": 32, "messages": [{"role": "user", "content": "Hi!"}]}


class CountBody(Body):
    """POST /v1/messages/count_tokens: a message body without the fields that shape the answer."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": EXAMPLE["messages"]}]})

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: TextBlocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None

    def as_chat(self) -> ChatBody:
        return chat_body(self.chat_fields(), self)

    def chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return {
            "model": self.model,
            "messages": system + [turn for given in self.messages for turn in given.as_chat()],
            "continue_final_message": self.messages[-1].role == "assistant" or None,
            "tools": [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or []]
            or None,
            "tool_choice": self._tool_choice(),
        }

    def warnings(self) -> list[str]:
        """What is accepted and changes nothing."""
        thinks = (self.thinking or {}).get("type", "disabled") != "disabled"
        return ["thinking: the model decides itself whether it thinks"] if thinks else []

    def _tool_choice(self) -> Any:
        if self.tool_choice is None:
            return None
        if self.tool_choice.type == "tool":
            return {"type": "function", "function": {"name": self.tool_choice.name or ""}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.tool_choice.type]


class MessagesBody(CountBody):
    """POST /v1/messages. A last turn of the assistant is continued. Extensions (seed, min_p, ...) work here as well."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

    def chat_fields(self) -> dict[str, Any]:
        parallel = self.tool_choice.disable_parallel_tool_use if self.tool_choice is not None else None
        return super().chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "parallel_tool_calls": None if parallel is None else not parallel,
        }
