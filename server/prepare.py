"""From MODEL as the user wrote it to a canonical folder, in a process of its own when anything has to be converted.

The HTTP process stays free of tensors: conversion loads torch, so it runs elsewhere and reports over a pipe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from server.engine.messages import Progress
from server.engine_process import start_deaf
from server.service import StartupError

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


async def prepare(model: str | None, on_progress: Callable[[Progress], None]) -> Path:
    """A folder as it is; a file converted once; a hub id downloaded; None: the demo model. StartupError otherwise."""
    if model is not None and is_servable(Path(model)):
        return Path(model)
    check_exists(model)
    on_progress(Progress("convert"))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=prepare_aside, args=(sender, model), name="ropeway-prepare", daemon=True)
    start_deaf(process)
    sender.close()
    try:
        return await follow(receiver, on_progress)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def is_servable(folder: Path) -> bool:
    """A Hugging Face folder of safetensors; one of pickles has a config.json as well, and is converted."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def check_exists(model: str | None) -> None:
    """StartupError for what is neither here nor could be on the hub."""
    if model is not None and not Path(model).exists() and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        raise StartupError(f"no model at {model}: give a folder, a model file or a hub id such as org/name")


async def follow(receiver: Connection, on_progress: Callable[[Progress], None]) -> Path:
    """Read news until there is a folder (a Path) or a refusal (a text)."""
    while True:
        try:
            message = await asyncio.to_thread(receiver.recv)
        except EOFError:
            raise StartupError("the conversion ended unexpectedly: the machine may be out of memory") from None
        match message:
            case Progress():
                on_progress(message)
            case Path():
                return message
            case str():
                raise StartupError(message)


def prepare_aside(sender: Connection, model: str | None) -> None:
    """Entry of the preparing process. Its one line of refusal goes to the parent, which prints it."""
    try:
        sender.send(canonical_folder(model, sender.send))
    except Exception as error:
        sender.send(str(error) or type(error).__name__)


def canonical_folder(model: str | None, on_progress: Callable[[Progress], None]) -> Path:
    """What `prepare` gives, made in this process."""
    from convert.cache import ensure_canonical
    from convert.demo import demo_model_file

    if model is not None and not Path(model).exists():
        return download(model)
    source = demo_model_file() if model is None else Path(model)
    return ensure_canonical(source, progress=lambda detail: on_progress(Progress("convert", detail)))


def download(model: str) -> Path:
    """HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are honoured by the library itself."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"no {model} here, and the hub does not give it: {reason}") from None
