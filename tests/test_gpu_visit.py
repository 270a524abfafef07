"""The script for a visit to a GPU, in small and without one: every section runs, and needs no HTTP package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.gpu.lanes import Bounds, Found, Lane
from tests.gpu.tally import told

NOT_THERE = ("fastapi", "uvicorn", "starlette", "gguf", "httpx", "llguidance")
"""A machine with a GPU and no network may lack them."""


def settings(tmp_path: Path, first: str, *args: str, on_kernels: bool = False) -> dict[str, Any]:
    """Of a process that runs the script; every Python process of it runs the statement `first` before anything else.

    on_kernels: the GPU's, in Triton's interpreter, in place of the reference operations.
    """
    (tmp_path / "sitecustomize.py").write_text(first)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": str(int(on_kernels))}
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--tiny", "--json", str(results_in(tmp_path))]
    return {"args": [*command, *args], "cwd": REPOSITORY, "env": environment, "text": True}


def results_in(tmp_path: Path) -> Path:
    return tmp_path / "results" / "gpu.json"


def visit(
    tmp_path: Path, first: str, *args: str, on_kernels: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The script to its end, and what it found; see settings()."""
    done = subprocess.run(**settings(tmp_path, first, *args, on_kernels=on_kernels), capture_output=True, timeout=250)
    return done, json.loads(results_in(tmp_path).read_text())


def test_every_section_runs_in_small_without_the_http_packages(tmp_path: Path) -> None:
    """And beside another package that is named tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    done, found = visit(tmp_path, f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"attention-fp32", "model", "graphs", "invariance", "decode-8B", "load-256", "server-8B"} <= found.keys()
    skipped = {name for name, section in found.items() if section["status"] == "skipped"}
    assert skipped == {"decode-8B-int8", "decode-8B-fp8", "kernels"}
    assert {found[name]["status"] for name in found.keys() - skipped} <= {"ok", "missed"}, found
    assert found["graphs"]["same"] == found["graphs-invariant"]["same"] == 1


def instead_of(section: str, statement: str) -> str:
    """First statements of a process, in which this section does something else."""
    return f"import os, time; from tests.gpu.checks import CHECKS; CHECKS[{section!r}] = lambda visit: {statement}\n"


def test_a_section_that_kills_its_process_or_raises_does_not_take_the_others_along(tmp_path: Path) -> None:
    deadly = instead_of("sampling", "os._exit(3)") + instead_of("packages", "1 / 0")
    done, found = visit(tmp_path, deadly, "--lanes", "1", "--sections", "sampling,packages,small-kernels")
    assert done.returncode == 1
    assert found["sampling"]["status"] == found["packages"]["status"] == "failed"
    assert found["sampling"]["reason"] == "exit code 3: see above"
    assert found["packages"]["reason"] == "ZeroDivisionError: division by zero"
    assert "packages: Traceback" in done.stderr
    assert found["small-kernels"]["status"] == "ok"


def hanging(tmp_path: Path) -> str:
    """As first statement: sampling hangs, and so does a process that it started; both hold the pipe `held`."""
    os.mkfifo(tmp_path / "held")
    return instead_of("sampling", f"(open({str(tmp_path / 'held')!r}, 'w'), os.fork(), time.sleep(3600))")


def test_a_section_that_hangs_is_ended_with_all_it_started_and_the_others_go_on(tmp_path: Path) -> None:
    """Those beside it, those behind it, and those of the next turn."""
    hangs = hanging(tmp_path)
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    sections = "sampling,small-kernels,packages,limits"
    done, found = visit(tmp_path, hangs, "--lanes", "2", "--longest", "10", "--sections", sections)
    assert done.returncode == 1
    assert found["sampling"]["status"] == "failed" and found["sampling"]["reason"] == "no answer in 10 s"
    assert found["sampling"]["seconds"] >= 10
    assert [found[name]["status"] for name in sections.split(",")[1:]] == ["ok"] * 3
    os.set_blocking(held, True)
    assert os.read(held, 1) == b""  # its end: nobody holds it
    os.close(held)


def test_a_visit_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(**settings(tmp_path, hanging(tmp_path), "--sections", "sampling")) as process:
        with (tmp_path / "held").open() as held:  # opened once the section holds it
            process.terminate()
            assert held.read() == ""
        assert process.wait(60) == 130


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    done, found = visit(tmp_path, "", "--seconds", "0", "--sections", "sampling,model,limits")
    assert done.returncode == 0
    assert found == {name: {"status": "skipped", "reason": "out of time"} for name in ("sampling", "model", "limits")}


def begin(pipe: Connection, names: list[str]) -> None:
    """A child that begins its first section and never ends it."""
    pipe.send(None)
    signal.pause()


def test_a_section_that_ran_when_time_was_up_is_told_from_those_that_had_not_begun() -> None:
    found: dict[str, Found] = {}
    lane = Lane(["begun", "behind"], begin, Bounds(deadline=0.0, longest=0.0), found.__setitem__)
    lane.start()
    lane.hear()
    lane.give_up()
    lane.end()
    assert found["begun"]["reason"] == "out of time while it ran" and found["begun"]["seconds"] >= 0
    assert found["behind"] == {"status": "skipped", "reason": "out of time"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--lanes", "0"), "0 is less than 1"),
        (("--sections", "limits,nothing"), "no such section: nothing; there are"),
        (("--json", "."), "--json . cannot be written: Is a directory"),
        (("--device", "cuda"), "finds no GPU here; --device cpu --tiny"),
    ],
)
def test_a_visit_that_cannot_begin_says_why(tmp_path: Path, args: tuple[str, str], words: str) -> None:
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''"
    done = subprocess.run(**settings(tmp_path, hidden, *args), capture_output=True, timeout=250)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_figure_is_an_error(tmp_path: Path) -> None:
    blind = "from tests.gpu import checks; checks.error = lambda got, want: float('inf')"
    done, found = visit(tmp_path, blind, "--sections", "model")
    assert done.returncode == 1 and found["model"]["status"] == "wrong"


def test_a_case_that_raises_hides_no_other_and_spoils_no_other_section(tmp_path: Path) -> None:
    """After an illegal address every call of its process fails."""
    refusing = """
import torch
from tests.gpu.checks import CHECKS
real, spoiled = torch._int_mm, []
def refuse(left, right):
    if len(left) > 32:
        spoiled.append(left)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    return real(left, right) + 10**6
torch._int_mm = refuse
CHECKS["packages"] = lambda visit: {"status": "wrong" if spoiled else "ok"}
"""
    done, found = visit(tmp_path, refusing, "--lanes", "1", "--sections", "rounded-layers,packages")
    wrong = found["rounded-layers"]["wrong"]
    assert done.returncode == 1 and found["rounded-layers"]["cases"] == 6
    assert wrong.keys() == {"int8, 1 rows of 96: out", "int8, 17 rows of 96: out", "int8, 40 rows of 96"}
    assert wrong["int8, 40 rows of 96"] == "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"
    assert "rounded layers, int8, 40 rows of 96: Traceback" in done.stderr
    assert found["packages"]["status"] == "ok"


def test_of_a_long_error_both_ends_are_kept_and_the_cause_is_named() -> None:
    """A compiler's error begins with source, and the reason is in the error that it comes from."""
    reason, shown = AssertionError("the ranks differ"), RuntimeError(f"illegal address {'source ' * 200} at line 7")
    shown.__cause__ = ValueError("in between")
    shown.__cause__.__cause__ = reason
    words = told(shown)
    assert words.startswith("RuntimeError: illegal address")
    assert words.endswith("; from AssertionError: the ranks differ")
    assert "at line 7" in words and len(words) < 400
