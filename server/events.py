"""Server-sent events as text.

Knows how an event is written, neither who sends it nor what it means.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from server.errors import ApiError

DONE = "data: [DONE]\n\n"
dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event_text(value: dict[str, Any]) -> str:
    return f"data: {dumps(value)}\n\n"


def named_event(value: dict[str, Any]) -> str:
    """An event whose name is its type, as the Responses and Messages APIs have it."""
    return f"event: {value['type']}\n{event_text(value)}"


def error_text(error: ApiError) -> str:
    return event_text(error.body())
