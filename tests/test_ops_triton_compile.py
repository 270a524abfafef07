"""What the Triton kernels compile to for chips that are not there: wide loads, copies in flight, no spills, room.

Knows what a good kernel looks like in PTX, not how to compile one (tests/triton_compiler.py, in processes of its own,
as interpreted kernels cannot be compiled).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: make test-triton")
pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have
SPILLED = {"int8": 256, "fp8": 256, "fp32": 256, "invariant": 256, "sampling": 8}
"""Bytes a thread; for the draw, the assembler chooses 64 registers, so that two rows fit a processor."""
ATTENTION = ("prefill_kernel", "decode_kernel")
Report = dict[str, Any]


@pytest.fixture(scope="module", params=sorted(SHARED_MEMORY), ids=lambda arch: f"sm_{arch}")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return told(tmp_path_factory.mktemp("triton"), str(request.param))


def told(cache: Path, *words: str) -> list[Report]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton 3.9 warns where nobody chose
    command = [sys.executable, "-m", "tests.triton_compiler", *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_programs_fit_the_chip(reports: list[Report]) -> None:
    assert len({report["case"] for report in reports}) == 13
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY[report["arch"]], report


def test_nothing_spills_where_speed_is_promised(reports: list[Report]) -> None:
    for report in reports:
        assert report["local"] <= SPILLED.get(report["case"], 0), report


def test_rows_are_moved_16_bytes_at_a_time(reports: list[Report]) -> None:
    for report in reports:
        if report["kernel"] in ("add_rms_norm_kernel", "silu_mul_kernel", "copy_pages_kernel"):
            assert report["loads"].get("16", 0) > 0 and "2" not in report["loads"], report
        if report["kernel"] in ATTENTION:
            assert report["loads"].get("16", 0) > 0, report


def test_keys_and_values_are_copied_ahead(reports: list[Report]) -> None:
    """Asynchronously and 16 bytes at a time, beside page ids of 4; one-byte caches in pieces of 8 at least."""
    for report in reports:
        if report["kernel"] == "linear_kernel":
            assert set(report["copies"]) == {"16"}, report
        if report["kernel"] in ATTENTION:
            narrow = {"4", "8", "16"} if report["case"] in ("int8", "fp8") else {"4", "16"}
            assert {"16"} <= set(report["copies"]) <= narrow, report


def test_half_precision_goes_through_matrix_instructions(reports: list[Report]) -> None:
    for report in reports:
        if report["kernel"] in (*ATTENTION, "linear_kernel") and report["case"] != "fp32":
            assert report["products"] > 0, report


def test_no_step_of_a_client_compiles_anything(tmp_path: Path) -> None:
    """Whatever its number of tokens and sequences, and however long they are: the start of a server did it all."""
    steps = told(tmp_path, "90", "steps")
    assert sum(len(step["new"]) for step in steps if step["warm_up"]) > 0
    assert [step for step in steps if step["new"] and not step["warm_up"]] == []
