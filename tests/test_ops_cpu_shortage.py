"""Native operations that lack memory: a MemoryError that names them, and the same bits once there is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, ModelFactory
from tests.native_ops import native_library


def outcomes(*arguments: str | Path) -> dict[str, tuple[str | None, str]]:
    """Operation -> what it said and a digest of what it made, from a process of its own."""
    native_library()
    command = [sys.executable, "-m", "tests.native_shortage", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str | None, str]] = json.loads(done.stdout)
    return found


@pytest.mark.fault
def test_every_operation_that_needs_memory_says_so_and_works_again_later(tiny_model: ModelFactory) -> None:
    folder = tiny_model(intermediate_size=16384)
    plenty, limited = outcomes(folder), outcomes(folder, "limited")
    for name, (said, _) in limited.items():
        assert said == f"{name.split()[0]} lacked memory for what it keeps between its parts"
    assert [made for _, made in limited.values()] == [made for _, made in plenty.values()]
