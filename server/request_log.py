"""Logs as JSON, one object a line on stderr: requests, and what uvicorn has to say.

Texts of prompts and answers are never in it, unless --log-prompts asks for the request bodies.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from server.watch import Watched


def log_request(watched: Watched, log_prompts: bool = False) -> None:
    state, reply = watched.scope["state"], watched.reply
    caller = state.get("caller")
    line: dict[str, Any] = {
        "event": "request",
        "request_id": watched.request_id,
        "client": (watched.scope.get("client") or ("",))[0],
        "tenant": caller.tenant if caller is not None else None,
        "method": watched.scope["method"],
        "path": watched.scope["path"],
        "status": watched.status,
        "seconds": round(watched.ended - watched.started, 6),
    }
    if reply is not None:
        line |= {"model": reply.model, "reply_id": reply.id, "usage": reply.usage(), "finish": reply.generation.ends}
    if log_prompts and watched.body:
        line["body"] = watched.body.decode(errors="replace")
    write("info", watched.ended, line)


def write(level: str, when: float, fields: dict[str, Any]) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) + f".{int(when % 1 * 1000):03d}Z"
    print(json.dumps({"time": stamp, "level": level} | fields), file=sys.stderr, flush=True)


class JsonHandler(logging.Handler):
    """For uvicorn's loggers: text and traceback in one line."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"event": "log", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        write(record.levelname.lower(), record.created, fields)


def json_log_config() -> dict[str, Any]:
    """What uvicorn is told instead of its own settings."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"json": {"class": "server.request_log.JsonHandler"}},
        "loggers": {"uvicorn": {"handlers": ["json"], "level": "WARNING", "propagate": False}},
    }
