"""The script for a visit to a GPU, in small and without one: every section runs, and needs no HTTP package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

NOT_THERE = ("fastapi", "uvicorn", "starlette", "gguf", "httpx", "llguidance")
"""A machine with a GPU and no network may lack them."""


def visit(
    tmp_path: Path, first: str, *args: str, on_kernels: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the script; every Python process of it runs the statement `first` before anything else.

    on_kernels: the GPU's, in Triton's interpreter, in place of the reference operations.
    """
    (tmp_path / "sitecustomize.py").write_text(first)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": str(int(on_kernels))}
    results = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--tiny", "--json", str(results), *args]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=250)
    return done, json.loads(results.read_text())


def test_every_section_runs_in_small_without_the_http_packages(tmp_path: Path) -> None:
    done, found = visit(tmp_path, f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"attention", "model", "graphs", "invariance", "decode-8B", "load-256", "server-8B"} <= found.keys()
    assert {section["status"] for section in found.values()} <= {"ok", "missed"}, found
    assert found["graphs"]["same"] == found["graphs"]["same_invariant"] == 1


def test_a_section_that_kills_its_process_does_not_take_the_others_along(tmp_path: Path) -> None:
    deadly = "import os; from tests.gpu.checks import CHECKS; CHECKS['attention'] = lambda visit: os._exit(3)"
    done, found = visit(tmp_path, deadly, "--sections", "attention,small-kernels")
    assert done.returncode == 1
    assert found["attention"] == {"status": "failed", "reason": "exit code 3: see above"}
    assert found["small-kernels"]["status"] == "ok"


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    done, found = visit(tmp_path, "", "--seconds", "0", "--sections", "attention,model")
    assert done.returncode == 0
    assert found == {name: {"status": "skipped", "reason": "out of time"} for name in ("attention", "model")}


def test_a_wrong_figure_is_an_error(tmp_path: Path) -> None:
    blind = "from tests.gpu import checks; checks.error = lambda got, want: float('inf')"
    done, found = visit(tmp_path, blind, "--sections", "model")
    assert done.returncode == 1 and found["model"]["status"] == "wrong"
