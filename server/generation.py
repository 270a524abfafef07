"""One API request as the engine's choices: rows come in, text deltas go out, the same for streams and whole replies.

Knows tokens and text, no JSON shapes: routes turn deltas into the format of their API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from server.choice import Choice, Delta, PromptText, TextOptions
from server.client import EngineClient, EngineDeadError, StreamCutError
from server.engine.messages import GrammarSpec, RequestTimes, RequestUsage, Row, SamplingParams, Submit
from server.errors import ApiError, bad_request
from server.metrics import Metrics
from server.places import QueueFullError, TooManyError
from server.stream import Busy, SlowReaderError, Stream
from server.token_bytes import TokenBytes

Show = Callable[[list[Delta]], Busy]
"""Takes what a step brought, one delta a choice; says what has to be over before it takes more."""


class Generation:
    """All prompts and choices of one request: choice c of prompt p has index p * n + c."""

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[PromptText],
        params: Sequence[SamplingParams],
        vocabulary: TokenBytes,
        options: TextOptions,
        metrics: Metrics,
        *,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> None:
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.warnings: list[str] = []
        self._cached: dict[str, int] = {}
        self.failure: str | None = None
        self.kv_usage = False
        """The engine's bill for KV memory is wanted: it comes with the last row of a choice, even of a stopped one."""
        self._bills: list[RequestUsage] = []
        self._complete: list[tuple[str, int]] = []  # choices whose text ended before the engine knew
        self.submits = [
            Submit(
                f"{request_id}-{index}",
                Submit.pack(prompt.tokens),
                own,
                priority=priority,
                grammar=grammar,
                cache_salt=cache_salt,
            )
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        n = params[0].n
        self.choices = {
            (submit.id, choice): Choice(
                index * n + choice, prompt, vocabulary, options, metrics.request(len(prompt.tokens))
            )
            for index, (submit, prompt) in enumerate(zip(self.submits, prompts, strict=True))
            for choice in range(n)
        }
        self._running = len(self.choices)

    def set_tenant(self, tenant: str) -> None:
        """Whose requests these are, for fair queueing and the KV accounts."""
        self.submits = [replace(submit, tenant=tenant) for submit in self.submits]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def ends(self) -> list[str]:
        """How each choice ended, "running" if it has not."""
        return [choice.finish or "running" for choice in self.choices.values()]

    @property
    def times(self) -> RequestTimes:
        """The longest of all choices: they run side by side."""
        each = [choice.times for choice in self.choices.values()]
        return RequestTimes(*(max(getattr(times, name) for times in each) for name in ("queue", "prefill", "decode")))

    def kv_cost(self) -> dict[str, Any] | None:
        """Sums over the choices, or None until the engine has told the cost of each."""
        if len(self._bills) < len(self.choices):
            return None
        return {
            "peak_bytes": sum(bill.kv_peak_bytes for bill in self._bills),
            "byte_seconds": sum(bill.kv_byte_ns for bill in self._bills) / 1e9,
            "pages": sum(bill.peak_pages for bill in self._bills),
            "cached_tokens": self.cached_tokens,
        }

    async def run(
        self, client: EngineClient, show: Show, timeout: float | None = None, queue_timeout: float | None = None
    ) -> None:
        """Submit and follow to the end: `show` gets the deltas of each step, in the call that brought them.

        ApiError when there is no answer. Cancelling aborts.
        """
        try:
            await self._follow(client, show, timeout, queue_timeout)
        except StreamCutError as cut:
            if cut.reason != "timeout":
                raise refusal_of(cut) from None
            self.warnings.append(f"timeout: ended after {timeout:g} s, before max_tokens or a stop")
            show([choice.cut() for choice in self.choices.values() if choice.finish is None])
        except QueueFullError as full:
            raise queue_is_full(full) from None
        except TooManyError as error:
            raise bad_request(str(error)) from None
        except EngineDeadError as dead:
            raise engine_is_dead(dead) from None
        finally:
            for choice in self.choices.values():
                choice.leave()

    async def _follow(
        self, client: EngineClient, show: Show, timeout: float | None, queue_timeout: float | None
    ) -> None:
        def take(rows: list[Row]) -> Busy:
            busy = show(self.take(rows))
            if self.failure is not None:
                raise ApiError(500, self.failure, code="request_failed")
            self._stop_complete(client, stream)
            return busy

        async with client.stream(self.submits, take, timeout, queue_timeout) as stream:
            try:
                await stream.wait()
            except SlowReaderError:
                client.abort(stream, "slow_reader")
                raise

    def _stop_complete(self, client: EngineClient, stream: Stream) -> None:
        """Text may be complete before the engine knows."""
        if not self._running:
            client.finish(stream, wait=self.kv_usage)
        elif self._complete:
            client.finish_choices(self._complete)
        self._complete = []

    def take(self, rows: list[Row]) -> list[Delta]:
        """What these rows bring, one delta a choice; `failure` says so if the engine gave the request up."""
        deltas: dict[int, Delta] = {}
        for row in rows:
            choice = self.choices[(row.id, row.choice)]
            if row.usage is not None:
                self._bills.append(row.usage)
            if choice.finish is not None:
                continue
            if row.finish in ("error", "abort"):
                self.failure = row.error or "the engine gave this request up"
                break  # what came before it is still shown
            if row.cached_tokens is not None:
                self._cached.setdefault(row.id, row.cached_tokens)
            if (delta := deltas.get(choice.index)) is None:
                delta = deltas[choice.index] = Delta(choice.index)
            if choice.take(row, delta):
                self._complete.append((row.id, row.choice))
            self._running -= choice.finish is not None
        return list(deltas.values())


def refusal_of(cut: StreamCutError) -> ApiError:
    text = {
        "queue_timeout": "queue_timeout: the request did not get its turn in time",
        "drain": "the server is shutting down and this request ran out of time",
        "slow_reader": "the stream was not read for too long",
    }.get(cut.reason, f"the request was ended ({cut.reason})")
    return ApiError(503, text, code=cut.reason, headers={"Retry-After": "1"})


def queue_is_full(full: QueueFullError) -> ApiError:
    return ApiError(429, str(full), code="queue_full", headers={"Retry-After": str(full.retry_after)})


def engine_is_dead(dead: EngineDeadError) -> ApiError:
    return ApiError(500, f"the engine is gone: {dead}", code="engine_dead")
