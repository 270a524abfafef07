"""Replies of POST /v1/responses: chat deltas become output items, and the events that tell of them.

One machine makes both: a reply that does not stream is the last state of the same items.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from server.choice import Delta
from server.errors import ApiError
from server.events import named_event
from server.replies import Reply, timings
from server.responses_body import ResponsesBody

Kind = Literal["reasoning", "message", "function_call"]
Event = dict[str, Any]
ECHOED = {"metadata", "reasoning", "text", "tool_choice", "tools"}
"""What a response repeats of its request: not the conversation, which may be long."""
ID_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
DELTA = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class Item:
    """One output item. text: of a message or of reasoning, or the arguments of a call."""

    kind: Kind
    id: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[Any] = field(default_factory=list)

    def shown(self, status: str) -> dict[str, Any]:
        base: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return base | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if self.text else []
        own: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return base | own | {"content": content}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class Output:
    """The items so far, at most one of them open, and the events that opening, growing and closing makes."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False
        self._call = -1

    def feed(self, delta: dict[str, Any], logprobs: list[Any]) -> list[Event]:
        """delta: of a chat chunk, or a whole chat message."""
        events: list[Event] = []
        if delta.get("reasoning_content"):
            events += self._grow("reasoning", delta["reasoning_content"], [])
        if delta.get("content"):
            events += self._grow("message", delta["content"], logprobs)
        for index, call in enumerate(delta.get("tool_calls") or []):
            events += self._grow_call(call.get("index", index), call)
        return events

    def _grow(self, kind: Kind, text: str, logprobs: list[Any]) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self.items[-1].kind != kind:
            events += [*self.close(), *self._open(kind)]
        item = self.items[-1]
        item.text += text
        item.logprobs += logprobs
        extra = {"logprobs": logprobs} if kind == "message" else {}
        return [*events, self._event(f"{DELTA[kind]}.delta", delta=text, **self._inside(), **extra)]

    def _grow_call(self, index: int, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if index != self._call:
            events += self.close()
            self._call = index
            events += self._open("function_call", call["function"]["name"], call["id"])
        arguments = call["function"].get("arguments") or ""
        self.items[-1].text += arguments
        return [*events, self._event(f"{DELTA['function_call']}.delta", delta=arguments)] if arguments else events

    def _open(self, kind: Kind, name: str = "", call_id: str = "") -> list[Event]:
        item = Item(kind, f"{ID_PREFIX[kind]}_{secrets.token_hex(12)}", name=name, call_id=call_id)
        self.items.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        events = [added | {"item": item.shown("in_progress")}]
        if kind == "message":
            events.append(self._event("response.content_part.added", part=item.part(), content_index=0))
        return events

    def close(self) -> list[Event]:
        """The open item is complete."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        if item.kind == "function_call":
            events = [self._event(f"{DELTA[item.kind]}.done", arguments=item.text, name=item.name)]
        else:
            events = [self._event(f"{DELTA[item.kind]}.done", text=item.text, **self._inside())]
        if item.kind == "message":
            events[0]["logprobs"] = item.logprobs
            events.append(self._event("response.content_part.done", part=item.part(), content_index=0))
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*events, done | {"item": item.shown("completed")}]

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "item_id": self.items[-1].id, "output_index": len(self.items) - 1} | fields

    def _inside(self) -> dict[str, int]:
        return {"content_index": 0}


class ResponsesReply:
    """The reply to one body, whole or as events."""

    def __init__(self, body: ResponsesBody) -> None:
        self._body = body
        self._output = Output()
        self._sent, self._finish = 0, ""

    def whole(self, reply: Reply) -> dict[str, Any]:
        [choice] = reply.whole()["choices"]
        self._output.feed(choice["message"], (choice["logprobs"] or {}).get("content") or [])
        return self._response(reply, choice["finish_reason"])

    def events(self, reply: Reply, deltas: list[Delta]) -> str:
        events = [] if self._sent else self._opening(reply)
        for choice in (choice for chunk in reply.chunks(deltas) for choice in chunk["choices"]):
            events += self._output.feed(choice["delta"], (choice["logprobs"] or {}).get("content") or [])
            self._finish = choice["finish_reason"] or self._finish
        return self._numbered(events)

    def last_events(self, reply: Reply) -> str:
        last = self._response(reply, self._finish)
        return self._numbered([*self._output.close(), {"type": f"response.{last['status']}", "response": last}])

    def _numbered(self, events: list[Event]) -> str:
        first, self._sent = self._sent, self._sent + len(events)
        return "".join(named_event(event | {"sequence_number": first + i}) for i, event in enumerate(events))

    def _opening(self, reply: Reply) -> list[Event]:
        response = self._response(reply, None)
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _response(self, reply: Reply, finish: str | None) -> dict[str, Any]:
        """finish None: it has only begun."""
        body, cut = self._body, finish == "length"
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        sent = body.model_dump(mode="json", by_alias=True, exclude_none=True, include=ECHOED)
        ended = {} if finish is None else {"usage": usage(reply), "timings": timings(reply.generation)}
        return {
            "id": reply.id.replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": sent.get("metadata", {}),
            "model": reply.model,
            "output": [] if finish is None else [item.shown("completed") for item in self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": sent.get("reasoning"),
            "store": False,
            "temperature": body.temperature,
            "text": sent.get("text", {"format": {"type": "text"}}),
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": sent.get("tools", []),
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        } | (ended | reply.warnings())


def usage(reply: Reply) -> dict[str, Any]:
    counted = reply.usage()
    details = counted.get("completion_tokens_details") or {}
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": reply.generation.cached_tokens},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": counted["total_tokens"],
    }


def error_event(error: ApiError) -> str:
    return named_event({"type": "error", "code": error.code, "message": error.message, "param": error.param})
