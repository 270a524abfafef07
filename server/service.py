"""What one running server is: its settings, engine, text tools and state, and how they come up and go down.

Knows no routes: they ask it whether they may work, and for the parts to work with.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from server.chat_output import OutputStyle
from server.chat_template import ChatTemplate, load_template
from server.client import EngineClient, EngineDeadError
from server.config import ServeConfig
from server.engine.facts import EngineConfig, EngineInfo
from server.engine.messages import GrammarSpec, Progress, StepOutput
from server.errors import ApiError, bad_request
from server.grammar_check import GrammarCheck
from server.kv_live import KvLive
from server.metrics import Metrics
from server.sampling import ModelLimits, sampling_defaults
from server.tokenizer import Tokenizer

Prepare = Callable[[str | None, Callable[[Progress], None]], Awaitable[Path]]
MakeClient = Callable[[EngineConfig], EngineClient]


class StartupError(Exception):
    """The server cannot start; the text is the one line for the operator."""


class Service:
    """State of one server. phase: convert, load, allocate, warm_up, ready, draining or failed."""

    def __init__(self, config: ServeConfig, prepare: Prepare, make_client: MakeClient = EngineClient) -> None:
        self.config = config
        self.started_at = time.time()
        self.phase, self.detail, self._stage = "load", "", ""
        self.failure: str | None = None
        self.draining = False
        self._serials = itertools.count()
        self.names: tuple[str, ...] = config.served_model_name or default_names(config.model)
        self.metrics = Metrics(self.names[0], lambda: self.client)
        self.client: EngineClient | None = None
        self.grammars: GrammarCheck | None = None
        self.kv: KvLive | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._prepare, self._make_client = prepare, make_client

    # ---- coming up

    async def load(self) -> None:
        """From MODEL to an engine that answers. Never raises: a failure is kept and told to on_failure."""
        try:
            await self._load()
        except (StartupError, EngineDeadError, OSError, ValueError) as error:
            self.fail(str(error))
        except Exception as error:  # files may hold what nobody thought of: no reason to load for ever
            model = self.config.model or "the demo model"
            self.fail(f"cannot load {model}: {type(error).__name__}: {' '.join(str(error).split())}")

    async def _load(self) -> None:
        begun = time.monotonic()
        folder = await self._prepare(self.config.model, self.show)
        self.metrics.engine.phases["convert"] = time.monotonic() - begun
        self.client = self._make_client(self.config.engine_config(str(folder)))
        self.client.on_progress, self.client.on_death = self.show, self.fail
        info, _ = await asyncio.gather(self.client.start(), asyncio.to_thread(self.open_text, folder))
        self.kv = KvLive(self.client, info, lambda: self.draining or self.failure is not None)
        self.client.on_step = self._observe
        self.set_limits(folder, info)
        self.show(Progress("ready"))

    def open_text(self, folder: Path) -> None:
        """Tokenizer and chat template of a canonical folder."""
        self.tokenizer = Tokenizer.from_folder(folder)
        names = {"bos_token": self.tokenizer.bos_token or "", "eos_token": self.tokenizer.eos_token or ""}
        self.template: ChatTemplate | None = load_template(folder, self.tokenizer.control, names)
        source = self.template.source if self.template is not None else ""
        self.style = OutputStyle.of(source, self.config.tool_parser, self.config.reasoning_parser)

    def set_limits(self, folder: Path, info: EngineInfo) -> None:
        """What requests are checked against from now on."""
        defaults = sampling_defaults(folder) if self.config.generation_defaults else {}
        self.limits = ModelLimits(info.vocab_size, info.max_model_len, self.tokenizer, defaults)
        self.grammars = GrammarCheck(folder, info.vocab_size)

    def _observe(self, output: StepOutput) -> None:
        self.metrics.observe_step(output)
        if self.kv is not None and output.kv_delta:
            self.kv.observe(output)

    def show(self, progress: Progress) -> None:
        """Keep the news for /startupz; each stage of a conversion is printed as well, since it may take minutes."""
        self.phase, self.detail = progress.phase, progress.detail
        stage = re.sub(r" \d+ %$", "", progress.detail)
        if progress.phase == "convert" and stage and stage != self._stage:
            print(f"ropeway: conversion: {stage}", file=sys.stderr, flush=True)
            self._stage = stage

    def fail(self, text: str) -> None:
        """Keep and print the first failure; what follows is its consequence."""
        if self.failure is not None:
            return
        self.phase, self.failure = "failed", text
        print(f"ropeway: {text}", file=sys.stderr, flush=True)
        self.on_failure()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        if self.grammars is not None:
            self.grammars.close()

    # ---- what routes ask

    def next_serial(self) -> int:
        return next(self._serials)

    @property
    def is_ready(self) -> bool:
        return self.not_ready() is None

    def not_ready(self) -> str | None:
        """Why new work is refused, or None."""
        if self.failure is not None:
            return f"the server has failed: {self.failure}"
        if self.draining:
            return "the server is shutting down"
        if self.phase != "ready":
            return f"the server is starting ({self.phase})"
        if self.client is not None and self.client.is_stalled(self.config.stall_timeout):
            return f"the engine has not made a step for {self.config.stall_timeout:g} s"
        return None

    def engine(self) -> EngineClient:
        """The engine to send new work to; ApiError 503 while there is none."""
        reason = self.not_ready()
        if reason is not None:
            raise ApiError(503, reason, code="not_ready", headers={"Retry-After": "5"})
        assert self.client is not None
        return self.client

    async def checked(self, grammar: tuple[str, GrammarSpec] | None) -> GrammarSpec | None:
        """A grammar (and the field that asks for it) in the engine's form; ApiError 400 where it cannot be followed,
        503 where that was not found out in time.
        """
        if grammar is None:
            return None
        assert self.grammars is not None
        try:
            return await self.grammars.checked(grammar[1])
        except ValueError as error:
            raise bad_request(f"{grammar[0]}: {error}", grammar[0]) from None
        except TimeoutError as error:
            raise ApiError(503, str(error), code="grammar_timeout", headers={"Retry-After": "5"}) from None

    @property
    def info(self) -> EngineInfo | None:
        return self.client.info if self.client is not None else None

    def check_model(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 lists the names there are."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {name[:100]!a} does not exist; served here: {known}",
                param="model",
                code="model_not_found",
            )
        return name or self.names[0]


def default_names(model: str | None) -> tuple[str, ...]:
    return (Path(model).name.removesuffix(".gguf") or model,) if model else ("SmolLM2-135M-Instruct",)
