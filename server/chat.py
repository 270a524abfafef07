"""`ropeway chat`: a small streaming conversation with a server, in a terminal or from a pipe.

Knows the chat API alone: any OpenAI-compatible server will do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

EXAMPLE = "http://127.0.0.1:8000"
HELP = "/exit ends, /new starts over; Ctrl-C stops an answer"


def chat(url: str, model: str | None = None, key: str | None = None, sampling: dict[str, float] | None = None) -> int:
    """Talk until the input ends. 0 at its end, 1 when the server cannot be reached or refuses.

    sampling: parameters of every request; what is left out is the server's choice.
    """
    if not url.startswith(("http://", "https://")):
        print(f"ropeway: {url}: not a server address (expected something like {EXAMPLE})", file=sys.stderr)
        return 1
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    interactive = sys.stdin.isatty()
    history: list[dict[str, str]] = []
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=httpx.Timeout(10, read=None)) as client:
        try:
            model = model or first_model(client)
            asked: dict[str, Any] = {"model": model, "stream": True} | (sampling or {})
            if interactive:
                print(f"{model} at {url}. {HELP}")
            for line in lines(interactive):
                if line == "/new":
                    history.clear()
                elif line:
                    history.append({"role": "user", "content": line})
                    history.append({"role": "assistant", "content": answer(client, asked | {"messages": history})})
        except httpx.ConnectError as error:
            print(f"ropeway: {url}: {error}; `ropeway serve` starts a server", file=sys.stderr)
            return 1
        except (httpx.HTTPError, RuntimeError) as error:
            print(f"ropeway: {url}: {error}", file=sys.stderr)
            return 1
    return 0


def first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise RuntimeError(message_of(response.content))
    return str(response.json()["data"][0]["id"])


def lines(interactive: bool) -> Iterator[str]:
    """What the user types, until /exit, the end of the input or Ctrl-C at the prompt."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        yield line


def answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """Print the answer as it comes; Ctrl-C keeps what has come. RuntimeError carries the server's own message."""
    text = ""
    try:
        for piece in stream(client, body):
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return text


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(message_of(response.read()))
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])


def message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
