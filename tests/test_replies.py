"""Events cut from a template are those that whole chunks make, whatever the text and the model's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.choice import Delta, PromptText, TextOptions
from server.engine.messages import Row, SamplingParams
from server.events import event_text
from server.generation import Generation
from server.metrics import Metrics
from server.replies import CHAT, COMPLETION, Format, Reply
from server.schemas import UsageWanted
from server.token_bytes import TokenBytes

WORDS = ("plain", '"', "\\", "\0", "é", "\u2028", "\n", "")
VOCABULARY = TokenBytes(tuple(word.encode() for word in WORDS), frozenset(), 0)
MODEL = 'a "model"\0'


def make_reply(format: Format, wanted: UsageWanted) -> Reply:
    params = [SamplingParams(100, n=2)]
    generation = Generation("r", [PromptText([1])], params, VOCABULARY, TextOptions(), Metrics("m", lambda: None))
    reply = Reply(format, MODEL, generation, VOCABULARY, False, wanted)
    reply.id, reply.created = "id", 1
    return reply


def steps(reply: Reply, tokens: list[list[int]]) -> Iterator[list[Delta]]:
    """Of both choices, a token each a step; a choice without one says nothing in that step."""
    for step in tokens:
        yield reply.generation.take([Row("r-0", choice, (token,)) for choice, token in enumerate(step)])
    yield reply.generation.take([Row("r-0", choice, (0,), finish="length") for choice in (0, 1)])


def as_events(reply: Reply, tokens: list[list[int]]) -> str:
    return "".join(map(reply.events, steps(reply, tokens))) + reply.last_events()


def as_chunks(reply: Reply, tokens: list[list[int]]) -> str:
    chunks = [chunk for deltas in steps(reply, tokens) for chunk in reply.chunks(deltas)]
    return "".join(map(event_text, [*chunks, *reply.last_chunks()]))


@pytest.mark.parametrize("wanted", get_args(UsageWanted))
@pytest.mark.parametrize("format", [CHAT, COMPLETION], ids=["chat", "completions"])
@given(st.lists(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=2), max_size=6))
def test_a_cut_event_is_a_whole_one(format: Format, wanted: UsageWanted, tokens: list[list[int]]) -> None:
    cut = as_events(make_reply(format, wanted), tokens)
    assert cut == as_chunks(make_reply(format, wanted), tokens)
