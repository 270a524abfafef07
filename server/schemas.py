"""Request bodies: which fields exist, of what type and within which limits.

Knows no model: what depends on a vocabulary or a context length is checked in sampling.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from server.body import Body
from server.output_schemas import ShapedBody, ToolCall, ToolsBody

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields of the OpenAI API that label a request and change no answer here: named in `warnings`, never refused."""

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "beam_width": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that callers know and this server does not serve, with the values that ask for nothing (null always does)."""

NO_BEAMS = "beam search is not offered; n with best_of ranks sampled choices"
REASONS = {
    "suffix": "no model served here fills in the middle; send the text before the gap as prompt",
    "use_beam_search": NO_BEAMS,
    "beam_width": NO_BEAMS,
    "length_penalty": NO_BEAMS,
}
"""Why, where there is more to say than that a field is not served."""


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


UsageWanted = Literal["never", "at_end", "always"]
TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(max_length=1024)]


def text_or_list(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


StopField = Annotated[
    Annotated[Stop, Tag("text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("list")],
    Discriminator(text_or_list),
]


class GenerationBody(ShapedBody):
    """What completions and chat have in common. null means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=128)] | None = (
        None
    )
    stop: StopField | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    queue_timeout: Annotated[float, Field(gt=0)] | None = None
    kv_usage: bool | None = None

    @model_validator(mode="after")
    def check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.min_tokens and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; send stream: false")
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> GenerationBody:
        n = self.n or 1
        if self.best_of is None or self.best_of == n:
            return self
        if self.best_of < n:
            raise ValueError(f"best_of {self.best_of} is less than n {n}")
        if self.stream:
            raise ValueError(f"best_of {self.best_of} above n {n} cannot be streamed: the best are known at the end")
        if self.stops:
            raise ValueError(f"best_of {self.best_of} above n {n} ranks whole outputs: use stop_token_ids, not stop")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings without empty ones, which could only mean: stop at once."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def usage(self) -> UsageWanted:
        """In a stream: never, once at the end, or with every chunk."""
        options = self.stream_options or StreamOptions()
        at_end = options.include_usage or self.kv_usage
        return "always" if options.continuous_usage_stats else "at_end" if at_end else "never"


def prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "text"
    if value and isinstance(value[0], list):
        return "token lists"
    return "texts" if value and isinstance(value[0], str) else "tokens"


TokenList = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=MAX_CHOICES), Tag("texts")]
    | Annotated[TokenList, Tag("tokens")]
    | Annotated[list[TokenList], Field(max_length=MAX_CHOICES), Tag("token lists")],
    Discriminator(prompt_kind),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: a text, a list of texts, token ids, or a list of lists of them."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. Parts of a content are joined by a line break. developer is the newer name of system."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("list")], Discriminator(text_or_list)]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a chat template wants it."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": role, "content": text} | {name: value for name, value in more.items() if value} | calls


class ChatBody(GenerationBody, ToolsBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


def unknown_fields(body: GenerationBody) -> list[str]:
    """Fields that mean nothing here, in order. ValueError for one that asks for something this server does not do."""
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if name in WITHOUT_EFFECT or value is None:
            continue
        if name not in NOT_SUPPORTED:
            unknown.append(name)
        elif value not in NOT_SUPPORTED[name]:
            raise ValueError(name)
    return unknown


def fields_without_effect(body: GenerationBody) -> list[str]:
    return [name for name, value in (body.model_extra or {}).items() if name in WITHOUT_EFFECT and value is not None]
