"""Log-probabilities in the two formats of the OpenAI API: the list of chat and the columns of completions.

Knows token bytes and numbers. -inf and NaN, which JSON has not, become the lowest number and null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from server.engine.messages import TokenLogprob
from server.token_bytes import TokenBytes

LOWEST = -9999.0


def number(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, LOWEST)


def chat_logprobs(vocabulary: TokenBytes, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One entry a token, exactly as many alternatives as asked for, one an id, best first."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": vocabulary.label(token),
            "logprob": number(logprob),
            "bytes": list(vocabulary[token]),
        }

    content = [
        entry(item.token, item.logprob) | {"top_logprobs": [entry(token, value) for token, value in item.top]}
        for item in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    vocabulary: TokenBytes, entries: Sequence[TokenLogprob], offsets: Sequence[int]
) -> dict[str, Any]:
    """Columns. Alternatives are keyed by text: of two that read alike the likelier stands. The chosen is always in."""
    return {
        "tokens": [vocabulary.label(item.token) for item in entries],
        "token_logprobs": [number(item.logprob) for item in entries],
        "top_logprobs": [alternatives(vocabulary, item) for item in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    vocabulary: TokenBytes, entries: Sequence[TokenLogprob | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: one object a prompt token, keyed by token id. rank is null for a token not among the best."""

    def named(item: TokenLogprob) -> dict[str, dict[str, Any]]:
        ranked: list[tuple[int, float, int | None]] = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)
        ]
        if item.token not in dict(item.top):
            ranked.insert(0, (item.token, item.logprob, None))
        return {
            str(token): {"logprob": number(logprob), "rank": rank, "decoded_token": vocabulary.label(token)}
            for token, logprob, rank in ranked
        }

    return [None if item is None else named(item) for item in entries]


def alternatives(vocabulary: TokenBytes, item: TokenLogprob) -> dict[str, float | None] | None:
    if math.isnan(item.logprob):  # the first token of a prompt: nothing stands before it
        return None
    named: dict[str, float | None] = {}
    for token, logprob in (*item.top, (item.token, item.logprob)):
        named.setdefault(vocabulary.label(token), number(logprob))
    return named
