"""What MODEL on the command line becomes: served as it is, converted once, or refused in one line."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convert.atomic import exclusive
from convert.cache import cache_key, default_cache
from server.engine.messages import Progress
from server.prepare import prepare
from server.service import StartupError


def prepared(model: Path) -> tuple[Path, list[str]]:
    news: list[Progress] = []
    return asyncio.run(prepare(str(model), news.append)), [item.phase for item in news]


def test_a_folder_of_safetensors_is_served_as_it_is(tiny_model: Callable[..., Path]) -> None:
    assert prepared(tiny_model()) == (tiny_model(), [])


def test_a_folder_of_pickles_is_converted_although_it_has_a_config(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "cache"))
    source = write_pickles(tmp_path / "pickles", tiny_model())
    tensors = load_file(tiny_model() / "model.safetensors")
    folder, phases = prepared(source)
    assert folder.parent.is_relative_to(tmp_path / "cache") and "convert" in phases
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def write_pickles(folder: Path, model: Path) -> Path:
    """The same weights in a form that has to be converted."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_who_waits_for_the_conversion_of_another_says_so(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "cache"))
    source, news = write_pickles(tmp_path / "pickles", tiny_model()), list[str]()
    with ExitStack() as other:
        other.enter_context(exclusive(default_cache() / cache_key(source), print))

        def hear(progress: Progress) -> None:
            news.append(progress.detail)
            if progress.detail.startswith("waiting for another process"):
                other.close()

        folder = asyncio.run(prepare(str(source), hear))
    assert sum(str(folder) in line and line.startswith("waiting") for line in news) == 1


def test_a_file_that_is_still_read_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The file is so long that reading it takes hours."""
    file = tmp_path / "model.gguf"
    file.touch()
    os.truncate(file, 4 << 40)

    def is_read() -> bool:
        return any(link.resolve() == file for link in Path("/proc/self/fd").iterdir())

    async def begin_and_leave() -> None:
        task = asyncio.create_task(prepare(str(file), lambda progress: None))
        while not is_read():
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(begin_and_leave())  # waits for the thread


def test_a_folder_without_weights_is_refused_in_one_line(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copy(tiny_model() / "config.json", tmp_path)
    with pytest.raises(StartupError) as refused:
        prepared(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
