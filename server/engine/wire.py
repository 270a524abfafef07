"""Messages as bytes, for both ends of the pipe.

Knows the records of messages.py by name only. A step crosses once a token, as bare tuples: pickle looks every class up
by its name and calls it, which takes five times as long as all else that is in a step.
"""

from __future__ import annotations

import pickle
from typing import Any

from server.engine.facts import EngineConfig, EngineStats
from server.engine.messages import FromEngine, Row, StepOutput, ToEngine


def to_bytes(message: ToEngine | FromEngine | EngineConfig) -> bytes:
    content: Any = message
    if isinstance(message, StepOutput):
        content = tuple(map(tuple, message.rows)), tuple(message.stats), message.kv_delta
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)


def from_bytes(data: bytes | memoryview) -> Any:
    """What to_bytes was given, or what Connection.send was."""
    content = pickle.loads(data)
    if type(content) is not tuple:
        return content
    rows, stats, kv_delta = content
    return StepOutput(tuple(map(Row._make, rows)), EngineStats._make(stats), kv_delta)
