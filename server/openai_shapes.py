"""What OpenAI's classic endpoints answer, field by field: completions, chat, embeddings, models, and our tokenizer's.

Knows shapes only; replies are made elsewhere as plain dicts, and tests hold them against these.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
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
