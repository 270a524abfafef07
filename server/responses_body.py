"""Bodies of POST /v1/responses, and the chat each one asks for.

Stateless: nothing is stored, so a conversation comes whole in `input`. Knows nothing of replies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from server.as_chat import chat_body, function_call, function_tool
from server.body import Body
from server.errors import bad_request
from server.schemas import MAX_TOP_LOGPROBS, ChatBody, text_or_list

LOGPROBS = "message.output_text.logprobs"


class InputText(Body):
    """A part of a message. Other kinds (images, files, audio) are refused by their type."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[InputText], Tag("list")], Discriminator(text_or_list)]


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Body):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputResult(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class InputReasoning(Body):
    """Accepted as clients send it back, and left out: templates drop the reasoning of earlier turns."""

    type: Literal["reasoning"]


def item_kind(value: Any) -> str:
    return (value.get("type") or "message") if isinstance(value, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(item_kind),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolName(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | None = None


def name_or_object(value: Any) -> str:
    return "object" if isinstance(value, dict) else "name"


class ResponsesBody(Body):
    """POST /v1/responses. Fields of the chat endpoint beyond OpenAI's (top_k, seed, stop, ...) work here as well."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "Hi!", "max_output_tokens": 32}]})

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[InputItem], Field(min_length=1), Tag("list")],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("name")] | Annotated[ToolName, Tag("object")],
            Discriminator(name_or_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: Any = None
    conversation: Any = None

    @model_validator(mode="after")
    def check_stateless(self) -> ResponsesBody:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: nothing is stored here; send the whole conversation as input")
        return self

    def as_chat(self) -> ChatBody:
        wants_logprobs = LOGPROBS in (self.include or []) or self.top_logprobs is not None
        return chat_body(
            {
                "model": self.model,
                "messages": self._messages(),
                "stream": self.stream,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "logprobs": wants_logprobs or None,
                "top_logprobs": self.top_logprobs,
                "tools": [function_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or []]
                or None,
                "tool_choice": self._tool_choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._response_format(),
            },
            self,
        )

    def warnings(self) -> list[str]:
        """What is accepted and changes nothing."""
        effort = (self.reasoning or {}).get("effort")
        named = [f"include: {name!a} is not offered" for name in self.include or [] if name != LOGPROBS]
        return named + ([] if effort is None else ["reasoning.effort: accepted, has no effect here"])

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case InputMessage():
                    messages.append({"role": item.role, "content": text_of(item.content)})
                case InputCall():
                    add_call(messages, function_call(item.call_id, item.name, item.arguments))
                case InputResult():
                    result = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                    messages.append(result)
        return messages

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, ToolName):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.json_schema is None:
            raise bad_request("text.format.schema: this field is required for json_schema", "text.format.schema")
        inner = {"name": wanted.name or "answer", "schema": wanted.json_schema, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": inner}


def text_of(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Calls belong to the assistant's turn before them."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)
