"""What completions and chat send back: OpenAI objects and chunks made of a generation's deltas.

Knows the reply formats, neither request bodies nor how the engine is reached.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.choice import Delta
from server.events import dumps, event_text
from server.generation import Generation
from server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from server.schemas import UsageWanted
from server.token_bytes import TokenBytes
from server.tool_calls import CallDelta, add_calls

MARK = "\0"
"""Stands for the text of an event while its surroundings are cut."""


def completion_chunk(reply: Reply, delta: Delta) -> list[dict[str, Any]]:
    return [completion_choice(reply, delta)] if delta.text or delta.logprobs or delta.finish else []


def completion_choice(reply: Reply, delta: Delta) -> dict[str, Any]:
    logprobs = completion_logprobs(reply.vocabulary, delta.logprobs, delta.offsets) if reply.logprobs else None
    end = {"finish_reason": delta.finish} | stop_reason(delta)
    scored = delta.prompt_logprobs
    extra = {} if scored is None else {"prompt_logprobs": prompt_logprobs(reply.vocabulary, scored)}
    return {"index": delta.index, "text": delta.text, "logprobs": logprobs} | end | extra


def stop_reason(delta: Delta) -> dict[str, str]:
    """vLLM's name for the stop string that ended a choice."""
    return {} if delta.stop is None else {"stop_reason": delta.stop}


def chat_chunk(reply: Reply, delta: Delta) -> list[dict[str, Any]]:
    """The role first, then content, then the end on its own."""
    choices = []
    if delta.index not in reply.opened:
        reply.opened.add(delta.index)
        choices.append(chat_delta(delta.index, {"role": "assistant", "content": ""}))
    if delta.reasoning:
        thought = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        choices.append(chat_delta(delta.index, thought))
    if delta.text or delta.logprobs:
        logprobs = chat_logprobs(reply.vocabulary, delta.logprobs) if reply.logprobs else None
        choices.append(chat_delta(delta.index, {"content": delta.text}, logprobs))
    if delta.calls:
        choices.append(chat_delta(delta.index, {"tool_calls": [call_chunk(call) for call in delta.calls]}))
    if delta.finish is not None:
        choices.append(chat_delta(delta.index, {}, finish=delta.finish) | stop_reason(delta))
    return choices


def chat_delta(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def chat_choice(reply: Reply, delta: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.reasoning:
        message |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": [whole_call(call) for call in delta.calls]}
    logprobs = chat_logprobs(reply.vocabulary, delta.logprobs) if reply.logprobs else None
    end = {"finish_reason": delta.finish} | stop_reason(delta)
    return {"index": delta.index, "message": message, "logprobs": logprobs} | end


def whole_call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_chunk(call: CallDelta) -> dict[str, Any]:
    """Clients tie the parts of a call together by index; id, type and name come once."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index} | whole_call(call)


@dataclass(frozen=True, slots=True)
class Format:
    """What tells one API from the other in replies."""

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[Reply, Delta], dict[str, Any]]
    chunk: Callable[[Reply, Delta], list[dict[str, Any]]]


COMPLETION = Format("cmpl", "text_completion", "text_completion", completion_choice, completion_chunk)
CHAT = Format("chatcmpl", "chat.completion", "chat.completion.chunk", chat_choice, chat_chunk)


@dataclass(slots=True)
class Reply:
    """The reply to one request: its generation and how to show it."""

    format: Format
    model: str
    generation: Generation
    vocabulary: TokenBytes
    logprobs: bool
    usage_wanted: UsageWanted
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    opened: set[int] = field(default_factory=set)
    _total: dict[int, Delta] = field(default_factory=dict)
    _around: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"{self.format.id_prefix}-{secrets.token_hex(12)}"

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.generation.prompt_tokens, self.generation.completion_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens},
        }
        return usage | ({"kv_cache": self.generation.kv_cost()} if self.generation.kv_usage else {})

    def chunk_usage(self) -> dict[str, Any]:
        """Where usage comes at the end, every chunk before it says null."""
        if self.usage_wanted == "never":
            return {}
        return {"usage": self.usage() if self.usage_wanted == "always" else None}

    def head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    def warnings(self) -> dict[str, Any]:
        return {"warnings": self.generation.warnings} if self.generation.warnings else {}

    def add(self, deltas: list[Delta]) -> None:
        """Keep what a step brought for `whole`."""
        for delta in deltas:
            join(self._total.setdefault(delta.index, Delta(delta.index)), delta)

    def whole(self) -> dict[str, Any]:
        """The reply of a request that does not stream: the same deltas, joined."""
        total = self._total
        choices = [self.format.choice(self, total[index]) for index in sorted(total)]
        ends = {"choices": choices, "usage": self.usage(), "timings": timings(self.generation)}
        return self.head(self.format.object) | ends | self.scored_prompt(total[0]) | self.warnings()

    def scored_prompt(self, first: Delta) -> dict[str, Any]:
        """A chat has one prompt, so its scores stand beside the choices, as in vLLM."""
        if self.format is not CHAT or first.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.vocabulary, first.prompt_logprobs)}

    def events(self, deltas: list[Delta]) -> str:
        """Server-sent events of a step, all in one string."""
        return self._plain_text(deltas) or self._step_text(deltas)

    def last_events(self) -> str:
        return "".join(map(event_text, self.last_chunks()))

    def _plain_text(self, deltas: list[Delta]) -> str:
        """The events of a step that brought text and nothing else, as nearly all do; "" for any other step."""
        events = []
        for delta in deltas:
            around = self._around.get(delta.index)
            if around is None or not delta.is_plain:
                return ""
            events.append(f"{around[0]}{dumps(delta.text)}{around[1]}")
        return "".join(events)

    def _step_text(self, deltas: list[Delta]) -> str:
        text = "".join(map(event_text, self.chunks(deltas)))
        if self.usage_wanted != "always":
            self._around |= {d.index: self._cut(d.index) for d in deltas if d.index not in self._around}
        return text

    def _cut(self, index: int) -> tuple[str, str]:
        """What stands before and behind the text in an event of this choice, once it has begun."""
        [chunk] = self._chunks_of([Delta(index, MARK)])
        before, _, behind = event_text(chunk).rpartition(dumps(MARK))
        return before, behind

    def chunks(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """timings come on the last chunk of all."""
        chunks = self._chunks_of(deltas)
        if chunks and "running" not in self.generation.ends:
            chunks[-1] |= self.warnings()
            if self.usage_wanted == "never":
                chunks[-1]["timings"] = timings(self.generation)
        return chunks

    def _chunks_of(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        head = self.head(self.format.chunk_object)
        return [
            head | {"choices": [choice]} | self.chunk_usage()
            for delta in deltas
            for choice in self.format.chunk(self, delta)
        ]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What comes behind all steps."""
        if self.usage_wanted == "never":
            return []
        head = self.head(self.format.chunk_object)
        return [head | {"choices": [], "usage": self.usage(), "timings": timings(self.generation)}]


def join(total: Delta, delta: Delta) -> None:
    total.text += delta.text
    total.reasoning += delta.reasoning
    add_calls(total.calls, delta.calls)
    total.logprobs += delta.logprobs
    total.offsets += delta.offsets
    total.finish = delta.finish or total.finish
    total.stop = delta.stop or total.stop
    total.prompt_logprobs = delta.prompt_logprobs or total.prompt_logprobs


def timings(generation: Generation) -> dict[str, float | None]:
    """llama-server's names, and queue_ms. Rates leave out cached prompt tokens and each choice's first token."""
    times, cached = generation.times, generation.cached_tokens
    prompt, output = generation.prompt_tokens - cached, generation.completion_tokens
    return {
        "queue_ms": milliseconds(times.queue),
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": milliseconds(times.prefill),
        "prompt_per_second": rate(prompt, times.prefill),
        "predicted_n": output,
        "predicted_ms": milliseconds(times.decode),
        "predicted_per_second": rate(max(0, output - len(generation.choices)), times.decode),
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds > 0 else None
