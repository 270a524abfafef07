"""An engine process that does what the test says: it repeats each prompt, token by token, and fails on request.

Speaks messages.py over the real pipe, without a model, so that late, dying and silent engines can be tried.
Seeds choose a fault: see FAULTS. A folder named crash or die fails at start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from server.engine.facts import EngineConfig, EngineInfo, EngineStats
from server.engine.messages import (
    Abort,
    Admitted,
    Answer,
    Crashed,
    Progress,
    Query,
    Ready,
    RequestTimes,
    RequestUsage,
    Row,
    Shutdown,
    StepOutput,
    Submit,
    TokenLogprob,
)

KILL, CRASH, SILENT, ERROR = 1001, 1002, 1003, 1004
"""Faults by seed, from the third token on: exit 9; Crashed; never its turn, nor a row; an error row."""
SILENT_IS_IN = "scripted engine: a silent request is in"
"""Printed, since nothing else tells that such a request has crossed the pipe."""
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 259, 4, 65


def info(config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 512,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        backend="scripted",
        threads=1,
        batch_invariant=True,
        page_size=PAGE_SIZE,
        num_pages=(NUM_PAGES,),
        page_bytes=(1024,),
        kv_bytes_predicted=NUM_PAGES * 1024,
        kv_bytes_allocated=NUM_PAGES * 1024,
        kv_bytes_resident=0,
        weights_bytes=4096,
        workspace_bytes=0,
        rss_bytes=1 << 20,
        max_num_seqs=config.max_num_seqs or 32,
        max_num_batched_tokens=config.max_num_batched_tokens or 512,
        prefix_caching=True,
        pid=os.getpid(),
    )


@dataclass
class Running:
    """One choice: what it still has to say."""

    submit: Submit
    choice: int
    said: int = 0
    words: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.words = cycle(self.submit.token_ids())

    def row(self) -> Row:
        params, first = self.submit.params, self.said == 0
        token = next(self.words)
        self.said += 1
        stopped = token in params.stop_token_ids and self.said > params.min_tokens
        ended = stopped or self.said == params.max_tokens
        return Row(
            self.submit.id,
            self.choice,
            (token,),
            logprobs=() if params.logprobs is None else (self.logprob(token, params.logprobs),),
            prompt_logprobs=self.prompt_logprobs() if first and params.prompt_logprobs is not None else None,
            finish=("stop" if stopped else "length") if ended else None,
            stop_token=token if stopped else None,
            cached_tokens=2 if first else None,
            usage=RequestUsage(cached_tokens=2) if ended else None,
            times=RequestTimes(0.001, 0.002, 0.003) if ended else None,
        )

    def logprob(self, token: int, top: int) -> TokenLogprob:
        return TokenLogprob(token, -0.5, tuple(((token + step) % VOCAB_SIZE, -0.5 - step) for step in range(top)))

    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        top = self.submit.params.prompt_logprobs or 0
        return (None, *(self.logprob(token, top) for token in self.submit.token_ids()[1:]))


class ScriptedEngine:
    """Steps whenever something runs; a Query("hold") stops it until Query("go")."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.running: list[Running] = []
        self.aborted: list[tuple[str, str]] = []
        self.held = False
        self.steps = self.generated = self.prompts = 0

    def serve(self) -> None:
        while True:
            busy = any(item.submit.params.seed != SILENT for item in self.running) and not self.held
            while self.connection.poll(0 if busy else None):
                message = self.connection.recv()
                if isinstance(message, Shutdown):
                    return
                self.handle(message)
                busy = False
                if self.running and not self.held:
                    break
            if not self.held:
                self.step()

    def handle(self, message: Submit | Abort | Query) -> None:
        if isinstance(message, Submit):
            self.prompts += len(message.token_ids())
            self.running += [Running(message, choice) for choice in range(message.params.n)]
            if message.params.seed == SILENT:
                print(SILENT_IS_IN, flush=True)
            else:
                self.connection.send(Admitted((message.id,)))
        elif isinstance(message, Abort):
            self.aborted += [(id, message.reason) for id in message.ids]
            self.aborted += [(f"{id}/{choice}", message.reason) for id, choice in message.choices]
            self.running = [item for item in self.running if item.submit.id not in message.ids]
            self.running = [item for item in self.running if (item.submit.id, item.choice) not in message.choices]
            self.connection.send(StepOutput((), self.stats(0)))
        else:
            self.held = {"hold": True, "go": False}.get(message.kind, self.held)
            running = sorted({item.submit.id for item in self.running})
            error = "no such view" if message.kind == "unknown" else None
            value = {"running": running, "aborted": self.aborted, "spin": os.environ.get("GOMP_SPINCOUNT")}
            self.connection.send(Answer(message.id, value, error))

    def step(self) -> None:
        rows = [self.fault(item) or item.row() for item in self.running if item.submit.params.seed != SILENT]
        if not rows:
            return
        done = {(row.id, row.choice) for row in rows if row.finish}
        self.running = [item for item in self.running if (item.submit.id, item.choice) not in done]
        self.steps, self.generated = self.steps + 1, self.generated + len(rows)
        self.connection.send(StepOutput(tuple(rows), self.stats(len(rows))))

    def fault(self, item: Running) -> Row | None:
        if item.said < 2:
            return None
        if item.submit.params.seed == KILL:
            os._exit(9)
        if item.submit.params.seed == CRASH:
            self.connection.send(Crashed("the scripted engine was told to crash"))
            os._exit(1)
        if item.submit.params.seed == ERROR:
            return Row(item.submit.id, item.choice, finish="error", error="logits were not finite")
        return None

    def stats(self, rows: int) -> EngineStats:
        active = len(self.running)
        return EngineStats(
            running=active,
            pages_active=active,
            pages_cached=1,
            pages_free=NUM_PAGES - 2 - active,
            slots_used=active,
            slots_allocated=active * PAGE_SIZE,
            steps=self.steps,
            step_tokens=rows,
            prompt_tokens=self.prompts,
            generation_tokens=self.generated,
        )


def run(connection: Connection, config: EngineConfig) -> None:
    """The entry that EngineClient spawns."""
    if config.model.endswith("die"):
        os._exit(7)
    if config.model.endswith("crash"):
        connection.send(Crashed("no such checkpoint: told to crash"))
        return
    connection.send(Progress("load", "scripted"))
    while config.model.endswith("slow") and not Path(config.model, "go").exists():
        time.sleep(0.02)
    connection.send(Ready(info(config)))
    ScriptedEngine(connection).serve()
