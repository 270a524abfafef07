"""Bodies and replies of /v1/embeddings, /tokenize and /detokenize.

Knows shapes and limits, no vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from server.body import Body
from server.engine.messages import Pooling
from server.schemas import Message, Prompt, TokenId


class EmbeddingsBody(Body):
    """POST /v1/embeddings. input as in completions' prompt. One vector of length 1 for each.

    pooling: "last", the state of the last token (the default), or "mean", of all tokens.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["first text", "second text"]}]})

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    dimensions: None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    queue_timeout: Annotated[float, Field(gt=0)] | None = None


class TokenizeBody(Body):
    """POST /tokenize. Either prompt, a text, or messages, a conversation to which the chat template is applied."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello!", "return_token_strs": True}]})

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [72, 105]}]})

    model: str | None = None
    tokens: list[TokenId]
