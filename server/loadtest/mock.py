"""A server whose timings are known: it sends scripted tokens and logs what it sent and when.

Knows nothing about the load generator. Run `python -m server.loadtest.mock --help`.
The body field `mock` overrides the script for one request: {"ttft": s, "gap": s, "per_chunk": n, "fault": KIND}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import httptools

from server.loadtest.mock_script import FAULTS, Exchange, Mock, Script


class Session(asyncio.Protocol):
    """One connection: parses requests, plays scripts."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.timer: asyncio.TimerHandle | None = None
        self.exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.now = self.mock.clock()
        self.parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer:
            self.timer.cancel()
        if self.exchange:
            self._forget("client left")

    def on_url(self, url: bytes) -> None:
        self.path, self.body, self.id = url.decode(), bytearray(), ""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.id = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        mock = self.mock
        if self.path.endswith("/completions"):
            self._complete(json.loads(self.body))
        elif self.path == "/metrics":
            self._reply(mock.metrics().encode(), "text/plain")
        elif self.path == "/reset_prefix_cache":
            mock.seen.clear()
            self._reply(b"{}")
        elif self.path.endswith("/models"):
            self._reply(b'{"object":"list","data":[{"id":"mock","object":"model"}]}')
        else:
            self._reply(b"{}", status="200 OK" if self.path == "/health" else "404 Not Found")

    def _complete(self, body: dict[str, Any]) -> None:
        script = self._script(body.get("mock") or {})
        chat = "messages" in body
        prompt = " ".join(str(m["content"]) for m in body["messages"]) if chat else body["prompt"]
        tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        options = body.get("stream_options") or {}
        limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self.exchange = Exchange(
            self.id,
            self.now,
            tokens,
            self.mock.cached(prompt, tokens),
            limit,
            chat,
            script,
            bool(options.get("continuous_usage_stats")),
        )
        self.final_usage = bool(options.get("include_usage"))
        self.streamed = bool(body.get("stream"))
        self.admitted = False
        self.mock.admit(self._start)

    def _script(self, own: dict[str, Any]) -> Script:
        base = self.mock.script
        jitter = 1 + base.jitter * self.mock.random.uniform(-1, 1)
        fault = base.fault if self.mock.random.random() < base.fault_share else ""
        return Script(
            own.get("ttft", base.ttft * jitter),
            own.get("gap", base.gap * jitter),
            own.get("per_chunk", base.per_chunk),
            fault=own.get("fault", fault),
        )

    def _start(self) -> None:
        exchange = self.exchange
        if exchange is None:
            self.mock.running -= 1  # the client left the queue; the slot goes to the next
            return
        self.admitted = True
        self.mock.held_tokens += exchange.prompt_tokens
        fault = exchange.script.fault
        if fault in ("http_4xx", "http_5xx"):
            self._refuse("429 Too Many Requests" if fault == "http_4xx" else "500 Internal Server Error")
        elif fault == "not_a_stream" or not self.streamed:
            self.timer = self._at(exchange.script.ttft, self._whole)
        else:
            self.began = self.mock.clock()
            self.timer = self._at(exchange.script.ttft, self._step)

    def _at(self, delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_at(loop.time() + delay, call)

    def _step(self) -> None:
        exchange, script = self.exchange, self.exchange.script if self.exchange else Script()
        assert exchange is not None
        sent = sum(exchange.chunk_tokens)
        if not sent:
            self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if self._fault(script.fault, sent, exchange.max_tokens):
            return
        tokens = min(script.per_chunk, exchange.max_tokens - sent)
        last = sent + tokens == exchange.max_tokens
        self._event(self._chunk(tokens, sent + tokens, last))
        exchange.chunk_times.append(self.mock.clock())
        exchange.chunk_tokens.append(tokens)
        if last:
            self._close_stream(script.fault)
        else:  # from the beginning, so that delays do not add up
            due = self.began + script.ttft + script.gap * len(exchange.chunk_times)
            self.timer = self._at(max(0.0, due - self.mock.clock()), self._step)

    def _fault(self, fault: str, sent: int, limit: int) -> bool:
        """Plays the faults that strike inside a stream, once half of the tokens are out."""
        if fault == "empty":
            self._close_stream(fault)
            return True
        if fault not in ("stream_error", "truncated", "reset", "non_json", "stall") or sent < limit // 2:
            return False
        if fault == "stream_error":
            self._event(b'{"error":{"message":"the mock failed, as asked","type":"server_error"}}')
            self._end_body()
        elif fault == "non_json":
            self._event(b"<html>upstream timed out</html>")
            self._end_body()
        elif fault == "truncated":
            self._end_body()
        elif fault == "reset":
            self.transport.abort()
        else:
            return True  # stall: nothing more comes, and nothing closes
        self._finish(fault)
        return True

    def _chunk(self, tokens: int, upto: int, last: bool) -> bytes:
        exchange = self.exchange
        assert exchange is not None
        text, reason = " tok" * tokens, '"length"' if last else "null"
        usage = f',"usage":{self._usage(upto)}' if exchange.every_usage and exchange.script.fault != "no_usage" else ""
        kind = "chat.completion.chunk" if exchange.chat else "text_completion"
        content = f'"delta":{{"content":"{text}"}}' if exchange.chat else f'"text":"{text}"'
        return (
            f'{{"id":"{exchange.id}","object":"{kind}","created":1,"model":"mock","choices":[{{"index":0,{content},'
            f'"finish_reason":{reason}}}]{usage}}}'
        ).encode()

    def _usage(self, upto: int) -> str:
        assert self.exchange is not None
        prompt = self.exchange.prompt_tokens
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{upto},"total_tokens":{prompt + upto},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.exchange.cached_tokens}}}}}'
        )

    def _close_stream(self, fault: str) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self.final_usage and fault != "no_usage":
            self._event(
                f'{{"id":"{exchange.id}","object":"text_completion","created":1,"model":"mock","choices":[],'
                f'"usage":{self._usage(sum(exchange.chunk_tokens))}}}'.encode()
            )
        if fault != "no_done":
            self._event(b"[DONE]")
        self._end_body()
        self._finish(fault)

    def _whole(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        exchange.chunk_times, exchange.chunk_tokens = [self.mock.clock()], [exchange.max_tokens]
        exchange.every_usage = True
        chunk = self._chunk(exchange.max_tokens, exchange.max_tokens, True).replace(b'"delta"', b'"message"')
        self._reply(chunk)
        self._finish(exchange.script.fault)

    def _refuse(self, status: str) -> None:
        assert self.exchange is not None
        self._reply(b'{"error":{"message":"the mock refuses, as asked","type":"mock"}}', status=status)
        self._finish(self.exchange.script.fault)

    def _finish(self, fault: str) -> None:
        assert self.exchange is not None and self.admitted
        self._forget(fault)

    def _forget(self, fault: str) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.ended, exchange.fault = self.mock.clock(), fault
        self.mock.log(exchange)
        if self.admitted:
            self.mock.held_tokens -= exchange.prompt_tokens
            self.mock.leave()

    def _event(self, payload: bytes) -> None:
        event = b"data: " + payload + b"\n\n"
        self._write(b"%x\r\n%b\r\n" % (len(event), event))

    def _end_body(self) -> None:
        self._write(b"0\r\n\r\n")

    def _reply(self, body: bytes, kind: str = "application/json", status: str = "200 OK") -> None:
        self._write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _write(self, data: bytes) -> None:
        self.transport.write(data)


async def serve(mock: Mock, host: str, port: int) -> asyncio.Server:
    """Listen; port 0 picks a free one."""
    return await asyncio.get_running_loop().create_server(lambda: Session(mock), host, port, backlog=4096)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m server.loadtest.mock", description=__doc__.split("\n")[0])
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8001)
    made.add_argument("--ttft", type=float, default=0.05, help="seconds to the first token (default %(default)s)")
    made.add_argument("--gap", type=float, default=0.02, help="seconds between chunks (default %(default)s)")
    made.add_argument("--per-chunk", type=int, default=1, help="tokens in a chunk (default %(default)s)")
    made.add_argument("--jitter", type=float, default=0.0, help="share by which a request's times vary, 0 to 1")
    made.add_argument("--slots", type=int, default=0, help="requests served at once; the others wait (0: no limit)")
    made.add_argument("--fault", choices=FAULTS, default="", help="what goes wrong")
    made.add_argument("--fault-share", type=float, default=1.0, help="in which share of the requests")
    made.add_argument("--log", type=Path, help="write a JSON line for each request: what was sent and when")
    return made


async def run(options: argparse.Namespace) -> None:
    script = Script(
        options.ttft, options.gap, options.per_chunk, options.jitter, options.slots, options.fault, options.fault_share
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with (options.log or Path("/dev/null")).open("w", buffering=1) as file:
        server = await serve(
            Mock(script, lambda e: print(e.line(), file=file), perf_counter), options.host, options.port
        )
        print(f"mock server at http://{options.host}:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()


def main(argv: list[str]) -> int:
    asyncio.run(run(parser().parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
