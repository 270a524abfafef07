"""The soak command: a real server stays flat, a leak and unbalanced books are found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from server.loadtest.soak import MIB, Sample, Soak, faults, slope
from tests.conftest import REPOSITORY, LiveServer


def run_of(held: Callable[[int], float]) -> Soak:
    """Sixty rounds of half a minute; the http process holds held(round) MiB."""
    samples = [
        Sample(30.0 * number, 100 * number, {"http": int(held(number) * MIB), "engine": 200 * MIB})
        for number in range(60)
    ]
    return Soak(samples)


def test_a_line_is_found_with_its_error() -> None:
    seconds = [10.0 * number for number in range(30)]
    exact = slope(seconds, [5.0 + 3.0 * x for x in seconds])
    assert exact.rate == pytest.approx(3) and exact.error == pytest.approx(0, abs=1e-9)
    assert exact.growth == pytest.approx(870)
    rng = Random(1)
    noisy = slope(seconds, [100 * rng.random() for _ in seconds])
    assert abs(noisy.rate) < 3 * noisy.error


@pytest.mark.parametrize(
    ("held", "well"),
    [
        (lambda number: 50, True),
        (lambda number: 50 + Random(number).random() * 8, True),
        (lambda number: 50 + min(number, 15) * 4, True),
        (lambda number: 50 + number * 0.1 + Random(number).random(), False),
    ],
    ids=["flat", "noise", "warm-up", "100 KiB a round"],
)
def test_growth_counts_when_it_is_certain_and_after_the_warm_up(held: Callable[[int], float], well: bool) -> None:
    table, verdict = run_of(held).report(2 * MIB)
    assert verdict is well and ("http: " in table) and ("GROWS" in table) is not well


def test_what_was_not_expected_is_told() -> None:
    seen = run_of(lambda number: 50)
    seen.wrong.append("500 for {'prompt': ...}: internal error")
    table, verdict = seen.report(2 * MIB)
    assert not verdict and "500 for" in table


def test_books_out_of_balance_are_named() -> None:
    books = {
        "requests": {"running": 0, "waiting": 1},
        "pages": {"active": 2, "cached": 3, "free": 4, "total": 10},
        "slots": {"used": 5},
        "bytes": {"allocated": 100, "active": 20, "cached": 30, "free": 40, "scratch": 10},
    }
    found = faults(books)
    assert len(found) == 4 and any("2 pages are active" in fault for fault in found)


def soak(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.loadtest.soak", *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_a_few_seconds_against_a_server_that_runs(live_server: LiveServer) -> None:
    """Too short for a verdict on memory: the traffic, the books and the table."""
    done = soak("--url", live_server.url, "--minutes", "0.03", "--rounds", "5", "--users", "4", "--tolerance", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MiB/hour after warm-up" in done.stdout and done.stdout.count("flat") == 2


@pytest.mark.slow
def test_a_minute_of_soak_is_flat(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", max_position_embeddings=2048)
    done = soak(str(folder), "--minutes", "1", "--kv-cache-memory", "1MiB", "--tolerance", "4")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_client_is_watched_while_it_measures() -> None:
    """Three seconds are all start-up, so only the watching is judged here, not the slope."""
    command = [sys.executable, "-m", "server.loadtest.client_soak", "--minutes", "0.05", "--users", "2"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    *rows, verdict = ran.stdout.splitlines()
    ok, sent = int(verdict.split()[0]), int(verdict.split()[2])
    assert ok == sent > 0 and "exit code 0" in verdict, ran.stdout + ran.stderr
    assert len(rows) > 3 and float(rows[-1].split()[1]) > 1
