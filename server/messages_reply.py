"""Replies of POST /v1/messages: chat deltas become content blocks, and the events that tell of them.

One machine makes both: a reply that does not stream is the last state of the same blocks.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from server.choice import Delta
from server.errors import ApiError
from server.events import named_event
from server.replies import Reply, timings

Kind = Literal["thinking", "text", "tool_use"]
Event = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTA = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
ERROR_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class Blocks:
    """The content blocks so far, the last one open, and their events."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Kind, dict[str, Any], list[str]]] = []
        self._is_open = False
        self._call = -1

    def shown(self) -> list[dict[str, Any]]:
        return [finished(kind, start, "".join(parts)) for kind, start, parts in self._blocks]

    def feed(self, delta: dict[str, Any]) -> list[Event]:
        """delta: of a chat chunk, or a whole chat message."""
        events: list[Event] = []
        if delta.get("reasoning_content"):
            events += self._grow("thinking", delta["reasoning_content"])
        if delta.get("content"):
            events += self._grow("text", delta["content"])
        for index, call in enumerate(delta.get("tool_calls") or []):
            events += self._grow_call(call.get("index", index), call)
        return events

    def _grow(self, kind: Literal["thinking", "text"], text: str) -> list[Event]:
        type, name = DELTA[kind]
        events: list[Event] = []
        if not self._is_open or self._blocks[-1][0] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._open(kind, {"type": kind, name: ""} | signature)
        self._blocks[-1][2].append(text)
        return [*events, self._delta({"type": type, name: text})]

    def _grow_call(self, index: int, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if index != self._call:
            self._call = index
            start = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            events = self._open("tool_use", start)
        arguments = call["function"].get("arguments") or ""
        if arguments:
            self._blocks[-1][2].append(arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _open(self, kind: Kind, start: dict[str, Any]) -> list[Event]:
        events = self.close()
        self._blocks.append((kind, start, []))
        self._is_open = True
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}]

    def close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def finished(kind: Kind, start: dict[str, Any], text: str) -> dict[str, Any]:
    if kind == "tool_use":
        return start | {"input": arguments_of(text)}
    return start | {kind: text}


def arguments_of(text: str) -> dict[str, Any]:
    """Arguments that max_tokens or a stop string cut are no JSON: the reply says max_tokens, and shows none of them."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessagesReply:
    """The reply to one body, whole or as events."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._started, self._end = False, end({"finish_reason": "stop"})

    def whole(self, reply: Reply) -> dict[str, Any]:
        [choice] = reply.whole()["choices"]
        self._blocks.feed(choice["message"])
        ended = end(choice) | {"content": self._blocks.shown(), "usage": usage(reply)}
        return message(reply) | ended | {"timings": timings(reply.generation)} | reply.warnings()

    def events(self, reply: Reply, deltas: list[Delta]) -> str:
        events: list[Event] = [] if self._started else [{"type": "message_start", "message": message(reply)}]
        self._started = True
        for choice in (choice for chunk in reply.chunks(deltas) for choice in chunk["choices"]):
            events += self._blocks.feed(choice["delta"])
            self._end = end(choice) if choice["finish_reason"] else self._end
        return "".join(map(named_event, events))

    def last_events(self, reply: Reply) -> str:
        last = {"type": "message_delta", "delta": self._end, "usage": usage(reply)}
        last |= {"timings": timings(reply.generation)} | reply.warnings()
        return "".join(map(named_event, [*self._blocks.close(), last, {"type": "message_stop"}]))


def message(reply: Reply) -> dict[str, Any]:
    """Before its content is known."""
    return {
        "id": reply.id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(reply) | {"output_tokens": 0},
    }


def end(choice: dict[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    reason = "stop_sequence" if isinstance(stop, str) else STOP_REASONS[choice["finish_reason"]]
    return {"stop_reason": reason, "stop_sequence": stop if isinstance(stop, str) else None}


def usage(reply: Reply) -> dict[str, int]:
    """Anthropic counts cached input apart."""
    counted, cached = reply.usage(), reply.generation.cached_tokens
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counted["completion_tokens"],
    }


def error_body(error: ApiError) -> dict[str, Any]:
    inner = error.body()["error"]
    return {"type": "error", "error": inner | {"type": ERROR_TYPES.get(error.status, inner["type"])}}


def error_event(error: ApiError) -> str:
    return named_event(error_body(error))
