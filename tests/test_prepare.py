"""What MODEL on the command line becomes: served as it is, converted once, or refused in one line."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
    source = tmp_path / "pickles"
    shutil.copytree(tiny_model(), source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    folder, phases = prepared(source)
    assert folder.parent.is_relative_to(tmp_path / "cache") and "convert" in phases
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


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
