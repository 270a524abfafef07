"""What the other chat APIs answer, field by field: OpenAI's responses and Anthropic's messages.

Knows shapes only; replies are made elsewhere as plain dicts, and tests hold them against these.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from server.openai_shapes import EXACT, ChatToken, Ended

# ---- /v1/responses ------------------------------------------------------------------------------------------


@EXACT
class InputDetails(TypedDict):
    cached_tokens: int


@EXACT
class OutputDetails(TypedDict):
    reasoning_tokens: int


@EXACT
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@EXACT
class OutputPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatToken]]


@EXACT
class OutputItem(TypedDict):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


@EXACT
class ResponseObject(Ended):
    """OpenAI's response, without a store behind it; what it repeats of the request is as it was sent."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any] | None
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


# ---- /v1/messages -------------------------------------------------------------------------------------------


@EXACT
class MessagesUsage(TypedDict):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


@EXACT
class Block(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


@EXACT
class AnthropicMessage(Ended):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessagesUsage


@EXACT
class TokenCount(TypedDict):
    input_tokens: int
