"""From MODEL as the user wrote it to a canonical folder, in a process of its own when anything has to be converted.

The HTTP process stays free of tensors: conversion loads torch, so it runs elsewhere and reports over a pipe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from convert.cache import cached, ensure_canonical
from convert.canonical import needs_conversion
from convert.demo import demo_model_file
from convert.errors import ConvertError
from server.engine.messages import Progress
from server.engine_process import start_deaf
from server.service import StartupError

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model*"]
NOT_FROM_HUB = ["*/*", "consolidated*"]
"""Other forms of the same weights: the makers' own, beside or below those that transformers reads."""


async def prepare(model: str | None, on_progress: Callable[[Progress], None]) -> Path:
    """A folder as it is; a file converted once; a hub id downloaded; None: the demo model. StartupError otherwise."""
    if model is not None and is_servable(Path(model)):
        return Path(model)
    check_exists(model)
    on_progress(Progress("convert"))
    if (folder := await converted_before(model)) is not None:
        return folder
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


async def converted_before(model: str | None) -> Path | None:
    """What an earlier start made of a file: no need for a process to find it. Refusals are the other process's."""
    is_over = threading.Event()

    def look() -> Path | None:
        try:
            source = demo_model_file() if model is None else Path(model)
            return cached(source, is_over.is_set) if source.is_file() else None
        except (ConvertError, OSError):
            return None

    try:
        return await asyncio.to_thread(look)
    finally:
        is_over.set()  # the end of the program waits for threads


def is_servable(folder: Path) -> bool:
    """A Hugging Face folder of plain safetensors; pickles and quantised weights have a config.json too: converted."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return False
    try:
        return not needs_conversion(folder)
    except ConvertError as error:
        raise StartupError(str(error)) from None


def check_exists(model: str | None) -> None:
    """StartupError for what is neither here nor could be on the hub."""
    if model is None or Path(model).exists():
        return
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
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
    if model is None:
        source = demo_model_file()
    else:
        source = Path(model) if Path(model).exists() else download(model)
        if is_servable(source):
            return source
    return ensure_canonical(
        source, progress=lambda detail: on_progress(Progress("convert", detail)), needs_tokenizer=True
    )


def download(model: str) -> Path:
    """The folder of a hub id, fetched where it is not here. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are
    honoured by the library itself. Raises StartupError.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=NOT_FROM_HUB))
    except Exception as error:  # of the library, its HTTP client and the disk
        raise StartupError(hub_refusal(model, error)) from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise StartupError(f"{model} on the hub has no config.json with *.safetensors: download it and convert that")
    return folder


def hub_refusal(model: str, error: Exception) -> str:
    """One line: what the hub said, and what to do."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return f"{model} is not in the cache of the hub, and HF_HUB_OFFLINE forbids to fetch it"
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms at {hub}/{model}, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no model at {model}: neither a path here nor a repository at {hub} (a private one needs HF_TOKEN)"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    first = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    if isinstance(first, errors.HfHubHTTPError) and first.response.status_code < 500:
        return f"{hub} answered {first.response.status_code} for {model}: check the name and HF_ENDPOINT"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{model} is not here, and {hub} cannot be reached: check the network and HF_ENDPOINT"
    return f"{model} could not be fetched from {hub} (start again to go on): {reason}"
