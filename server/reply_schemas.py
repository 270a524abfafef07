"""What the endpoints answer, field by field: the schemas of /openapi.json. Tests hold real replies against them.

Knows shapes only; replies are made elsewhere as plain dicts.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

EXACT = with_config(ConfigDict(extra="forbid"))
Finish = Literal["stop", "length", "tool_calls"]
Number = float | None
"""null stands for NaN."""


# ---- parts of OpenAI's replies ------------------------------------------------------------------------------


@EXACT
class CachedTokens(TypedDict):
    cached_tokens: int


@EXACT
class KvCost(TypedDict):
    """Under kv_usage: what the request held of the KV cache, over all its choices."""

    peak_bytes: int
    byte_seconds: float
    pages: int
    cached_tokens: int


@EXACT
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    kv_cache: NotRequired[KvCost | None]


@EXACT
class Timings(TypedDict):
    """llama-server's names. Rates leave out cached prompt tokens and the first token of each choice."""

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: Number
    predicted_n: int
    predicted_ms: float
    predicted_per_second: Number


@EXACT
class RankedToken(TypedDict):
    logprob: Number
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class Ended(TypedDict):
    """At the end of every reply."""

    timings: NotRequired[Timings]
    warnings: NotRequired[list[str]]


# ---- /v1/completions ----------------------------------------------------------------------------------------


@EXACT
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[Number]
    top_logprobs: list[dict[str, Number] | None]
    text_offset: list[int]


@EXACT
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str]
    prompt_logprobs: NotRequired[PromptLogprobs]


@EXACT
class Completion(Ended):
    """Whole, or one chunk of a stream, where usage is null until the last one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


# ---- /v1/chat/completions -----------------------------------------------------------------------------------


@EXACT
class Alternative(TypedDict):
    token: str
    logprob: Number
    bytes: list[int]


@EXACT
class ChatToken(Alternative):
    top_logprobs: list[Alternative]


@EXACT
class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


@EXACT
class Function(TypedDict):
    name: NotRequired[str]
    arguments: str


@EXACT
class ToolCall(TypedDict):
    """In a stream, id, type and name come with the first part of a call, and index ties its parts together."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: Function


@EXACT
class ChatMessage(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatEnd(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str]


@EXACT
class ChatChoice(ChatEnd):
    message: ChatMessage


@EXACT
class ChatDelta(ChatEnd):
    delta: ChatMessage


@EXACT
class ChatCompletion(Ended):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


@EXACT
class ChatCompletionChunk(Ended):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: NotRequired[Usage | None]


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


# ---- the rest -----------------------------------------------------------------------------------------------


@EXACT
class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@EXACT
class Embedding(TypedDict):
    """embedding: numbers, or with encoding_format base64 little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@EXACT
class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    pooling: Literal["last", "mean"]
    usage: EmbeddingsUsage
    warnings: NotRequired[list[str]]


@EXACT
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@EXACT
class Text(TypedDict):
    prompt: str


@EXACT
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]


@EXACT
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


REPLIES: dict[str, TypeAdapter[Any]] = {
    path: TypeAdapter(shape)
    for path, shape in {
        "/v1/completions": Completion,
        "/v1/chat/completions": ChatCompletion,
        "/v1/responses": ResponseObject,
        "/v1/messages": AnthropicMessage,
        "/v1/messages/count_tokens": TokenCount,
        "/v1/embeddings": Embeddings,
        "/tokenize": Tokens,
        "/detokenize": Text,
        "/v1/models": Models,
        "/v1/models/{name}": Model,
    }.items()
}
CHUNKS: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
}
"""One event of a stream, where all events are alike."""
