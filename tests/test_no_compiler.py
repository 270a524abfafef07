"""A server on a machine without a compiler, and without kernels of an earlier start: slower, and it says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.conftest import ServerFactory

ASKED = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(("named", "says"), [("/nonexistent", "/nonexistent"), ("", "install g++")])
def test_it_serves_on_torch_operations_and_says_so(
    tiny_model: Callable[..., Path], server_factory: ServerFactory, tmp_path: Path, named: str, says: str
) -> None:
    empty = {name: "" for name in os.environ if name.startswith("ROPEWAY_KERNELS")}
    env = empty | {"CXX": named, "PATH": str(tmp_path), "ROPEWAY_CACHE": str(tmp_path / "cache")}
    live = server_factory(tiny_model(), "--kv-cache-memory", "512KiB", env=env)
    reply = httpx.post(f"{live.url}/v1/completions", json=ASKED, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 4
    backend = httpx.get(f"{live.url}/version").json()["backend"]
    assert backend.startswith("torch operations: ") and says in backend
    assert backend in live.output
    assert shutil.which("c++", path=str(tmp_path)) is None and not list((tmp_path / "cache").rglob("*.so"))
