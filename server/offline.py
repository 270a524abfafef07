"""LLM: the server's engine and text in this process, for scripts: `from server.offline import LLM`.

Knows no HTTP, no second process, no queue and no deadlines. A request has the fields of /v1/completions or
/v1/chat/completions and goes through the same code, so that it gives the same output here and there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from tqdm import tqdm

from server.begin import begin_chat, begin_completion, read_warnings
from server.config import ServeConfig
from server.engine.cores import usable_cores
from server.engine.facts import EngineConfig, EngineInfo
from server.engine.grammar import Grammars
from server.engine.messages import Abort, Progress, Row
from server.engine_process import CHILD_ENVIRONMENT
from server.errors import ApiError, from_validation
from server.grammar_check import GrammarCheck, Verdict, try_out
from server.offline_output import Output, Run
from server.prepare import canonical_folder, check_exists, is_servable, prepare
from server.replies import Reply
from server.schemas import ChatBody, CompletionBody, GenerationBody
from server.service import Service

if TYPE_CHECKING:
    from server.engine.core import Engine

Params = Mapping[str, Any]
"""Fields of a request, named as in a body: temperature, max_tokens, stop, seed, n, logprobs, ..."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked: how errors call it, the body that checks it, and what turns the body into a generation."""

    noun: str
    body: type[GenerationBody]
    begin: Callable[[Service, Any, str], Awaitable[Reply]]


PROMPT = Kind("prompt", CompletionBody, begin_completion)
CONVERSATION = Kind("conversation", ChatBody, begin_chat)
ENGINE_SETTINGS = {item.name for item in fields(EngineConfig)} - {"model", "max_queue"} | {"generation_defaults"}
ONLY_SERVED = ("stream", "stream_options", "timeout", "queue_timeout")


class LLM:
    """A model in this process; one thread at a time may use it. `with LLM(...) as llm` frees its memory at the end."""

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """model: a folder, model file or hub id; the demo model if left out. settings: flags of `ropeway serve` that
        concern the engine (kv_cache_memory="2GiB", max_model_len=4096, threads=2, ...).

        Raises TypeError for another name, ValueError, StartupError, MemoryError for what cannot be served.
        """
        config = engine_settings(model, settings)
        self._service = Service(config, prepare)
        folder = local_folder(config.model, self._service.show)
        self._service.open_text(folder)
        self._engine: Engine | None = start_engine(config.engine_config(str(folder)))
        self._service.set_limits(folder, self._engine.info)
        self._service.grammars = GrammarCheckHere(folder, self._engine.info.vocab_size)

    @property
    def info(self) -> EngineInfo:
        """Device, dtype, context length, size of the KV cache."""
        return self._opened().info

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Continue each prompt (a text or token ids); outputs in the order of the prompts.

        params: fields of a /v1/completions body, for all prompts or one set each. Nothing runs if one is wrong:
        ValueError says which and why. A fault of one request while it runs is in its output's `error`.
        """
        many: Any = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts
        asked = [{"prompt": prompt if isinstance(prompt, str) else list(prompt)} for prompt in many]
        return self._answer(PROMPT, asked, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Answer a conversation, or several, through the model's chat template; params as in /v1/chat/completions."""
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        asked = [{"messages": [dict(message) for message in conversation]} for conversation in many]
        return self._answer(CONVERSATION, asked, params, use_tqdm)

    def close(self) -> None:
        """Free weights and cache; the object cannot be used afterwards."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def _answer(
        self, kind: Kind, asked: Sequence[Params], params: Params | Sequence[Params] | None, use_tqdm: bool
    ) -> list[Output]:
        engine = self._opened()
        each = [params or {}] * len(asked) if params is None or isinstance(params, Mapping) else list(params)
        if len(each) != len(asked):
            raise ValueError(
                f"{len(asked)} {kind.noun}s with {len(each)} sets of params: give one for all, or one each"
            )

        async def begin_all() -> list[Reply]:
            bodies = [{**own, **request} for own, request in zip(each, asked, strict=True)]
            return [await begin_one(self._service, kind, body, i) for i, body in enumerate(bodies)]

        with ThreadPoolExecutor(1) as aside:  # notebooks have an event loop of their own in this thread
            replies = aside.submit(asyncio.run, begin_all()).result()
        runs = [Run(reply.generation, reply.logprobs) for reply in replies]
        follow(engine, runs, tqdm(total=len(runs), disable=not use_tqdm, unit=kind.noun))
        return [run.output() for run in runs]


class GrammarCheckHere(GrammarCheck):
    """Tries a script's own grammars in its own process: a spawned one would run the script again."""

    async def _ask(self, text: str) -> Verdict:
        return try_out(self._grammars_here, text)

    @cached_property
    def _grammars_here(self) -> Grammars:
        return Grammars(self._folder, self._vocab_size)


def engine_settings(model: str | Path | None, settings: Mapping[str, Any]) -> ServeConfig:
    """Checked as `ropeway serve` checks its flags; texts such as "2GiB" are read as there."""
    wrong = next((name for name in settings if name not in ENGINE_SETTINGS), None)
    if wrong is not None:
        raise TypeError(f"LLM has no setting {wrong!r}; there are {', '.join(sorted(ENGINE_SETTINGS))}")
    parse = {item.name: item.metadata["parse"] for item in fields(ServeConfig)}
    values = {name: parse[name](value) if isinstance(value, str) else value for name, value in settings.items()}
    values.setdefault("threads", usable_cores())  # now: a conversion loads torch
    return ServeConfig(model=None if model is None else str(model), strict_params=True, **values)


def local_folder(model: str | None, show: Callable[[Progress], None]) -> Path:
    """Converts or downloads in this process: a spawned one would run the caller's script again."""
    if model is not None and is_servable(Path(model)):
        return Path(model)
    check_exists(model)
    return canonical_folder(model, show)


def start_engine(config: EngineConfig) -> Engine:
    for name, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # OpenMP reads them once, when torch is loaded
    import torch

    from server.engine.startup import build_engine

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return build_engine(config)


async def begin_one(service: Service, kind: Kind, body: Params, number: int) -> Reply:
    """The checks of a server that runs with --strict-params; ValueError names the prompt and the field."""
    try:
        served = next((field for field in ONLY_SERVED if body.get(field) is not None), None)
        if served is not None:
            raise ValueError(f"{served}: only a server offers this")
        checked = kind.body.model_validate(body)
        read_warnings(service, checked)
        return await kind.begin(service, checked, f"offline-{number}")
    except ValidationError as error:
        reason = from_validation(error.errors()).message
    except (ApiError, ValueError) as error:
        reason = error.message if isinstance(error, ApiError) else str(error)
    raise ValueError(f"{kind.noun} {number}: {reason}")


def follow(engine: Engine, runs: Sequence[Run], bar: tqdm[Any]) -> None:
    """Run all to their ends. However this is left (Ctrl-C too), the engine is empty afterwards."""
    owners = {id: run for run in runs for id in run.ids}
    try:
        with bar:
            for run in runs:
                for submit in run.generation.submits:
                    engine.add(submit)
            while engine.has_work:
                for row in engine.step().rows:
                    advance(engine, owners[row.id], row, bar)
    finally:
        engine.abort(Abort(engine.request_ids()))
        while engine.has_work:
            engine.step()


def advance(engine: Engine, run: Run, row: Row, bar: tqdm[Any]) -> None:
    """A request whose text is complete needs no more tokens: its last rows bring the bill."""
    was_done = run.done
    run.take(row)
    if run.done and not was_done:
        bar.update()
        engine.abort(Abort(run.ids, "stop_string"))
