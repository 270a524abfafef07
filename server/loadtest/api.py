"""The bodies of completion requests, and what a server says about itself before a run.

Knows the OpenAI endpoints, not the clock and not the figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from server.loadtest.http import HttpClient, HttpError
from server.loadtest.stream import error_text, parsed
from server.loadtest.words import WORDS
from server.loadtest.workload import Filler, Prompt, Turn

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Message = dict[str, str]
SAMPLED = 60  # words: few enough for twice as many to fit a context of 512 tokens


class RefusedError(Exception):
    """The server cannot be tested as asked; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Api:
    """How to ask one server for one completion. `extra` is merged into every body last."""

    kind: str
    model: str
    ignore_eos: bool = True
    count_every_chunk: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    def body(self, turn: Turn, history: list[Message], stream: bool = True) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": turn.max_tokens, "temperature": 0.0}
        if self.kind == "chat":
            body["messages"] = [*history, {"role": "user", "content": turn.prompt}]
        else:
            body["prompt"] = turn.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream:
            body |= {"stream": True, "stream_options": self._stream_options()}
        return json.dumps(body | dict(self.extra)).encode()

    def _stream_options(self) -> dict[str, bool]:
        options = {"include_usage": True}
        return options | {"continuous_usage_stats": True} if self.count_every_chunk else options


async def first_model(client: HttpClient) -> str:
    status, body = await client.fetch("GET", "/v1/models")
    models = (parsed(body) or {}).get("data")
    if status != 200 or not models:
        advice = "give a key with --api-key" if status == 401 else "name one with --model"
        raise RefusedError(f"GET /v1/models answered {status} without a model ({error_text(body)}); {advice}")
    return str(models[0]["id"])


async def tokens_of(client: HttpClient, api: Api, prompt: Prompt) -> int | None:
    """Prompt tokens by the server's own count, one token generated; None where it reports no usage."""
    status, body = await client.fetch("POST", api.path, api.body(Turn(prompt, 1), [], stream=False))
    if status != 200:
        raise RefusedError(f"a first request of one token was answered {status}: {error_text(body)}")
    usage = (parsed(body) or {}).get("usage") or {}
    count = usage.get("prompt_tokens")
    return count if isinstance(count, int) else None


async def calibrated(client: HttpClient, api: Api) -> Filler:
    """How many tokens a word costs on this server, and a prompt beside its words: from the same words once and twice.

    They stand for all of WORDS, since a small vocabulary cuts long words into more tokens than short ones.
    """
    words = [WORDS[index * len(WORDS) // SAMPLED] for index in range(SAMPLED)]
    once = await tokens_of(client, api, " ".join(words))
    twice = await tokens_of(client, api, " ".join(words * 2))
    if once is None or twice is None or twice <= once:
        return Filler("words")
    return Filler("words", (twice - once) / SAMPLED, 2 * once - twice)


async def settled(client: HttpClient, api: Api) -> Api:
    """The same API, without the count in every chunk if the server refuses a stream that asks for it."""
    if not api.count_every_chunk:
        return api
    status, body = await client.fetch("POST", api.path, api.body(Turn("time", 1), []))
    if status not in (400, 422):
        return api
    plain = replace(api, count_every_chunk=False)
    again, _ = await client.fetch("POST", api.path, plain.body(Turn("time", 1), []))
    if again != 200:
        raise RefusedError(f"a first stream was answered {status}: {error_text(body)}")
    return plain


async def reset_cache(client: HttpClient) -> bool:
    """Ask the server to forget its prefix cache; False where it has no such route."""
    try:
        status, _ = await client.fetch("POST", "/reset_prefix_cache")
    except HttpError:
        return False
    return status == 200
