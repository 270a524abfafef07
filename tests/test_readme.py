"""The numbers in the README: each is recomputed here and compared with what is printed there.

Knows the README's wording of its four promises; speed is not among them (benchmarks are commands, not tests).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
README = " ".join((REPOSITORY / "README.md").read_text().split())


def printed(pattern: str) -> float:
    """The one number that the README prints at the group of this pattern."""
    found = re.findall(pattern, README)
    assert len(found) == 1, f"{pattern!r} stands {len(found)} times in README.md"
    return float(found[0].replace(",", ""))


def collected(*selection: str) -> list[str]:
    """The tests of a selection, each parameter set for itself.

    A file that does not load would make a number of them a lie, so it fails here.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *selection]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_same_tokens() -> None:
    """Each is one disturbed run of a bag of requests beside the undisturbed ones; the bag's own test compares none."""
    tests = collected("tests/test_promise_same_tokens.py")
    assert printed(r"([\d,]+) comparisons bit for bit") == sum("test_the_bag_" not in test for test in tests)


def test_faults() -> None:
    """A fault counts once, whatever the settings it is tried under."""
    kinds = {test.partition("[")[0] for test in collected("-m", "fault", "tests")}
    assert printed(r"([\d,]+) kinds of injected fault") == len(kinds)


def ropeway(*words: str) -> str:
    command = [sys.executable, "-m", "server", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_bytes_a_token() -> None:
    plan = json.loads(ropeway("plan", "--json"))
    assert printed(r"([\d,]+) bytes a token") == plan["token_bytes"]


@pytest.mark.slow
def test_the_proof_of_the_demo_model(tmp_path: Path) -> None:
    from convert.demo import demo_model_file

    ropeway("convert", str(demo_model_file()), str(tmp_path / "demo"))
    proof = json.loads((tmp_path / "demo" / "conversion_report.json").read_text())["proof"]
    assert proof["source_pairing"]["verdict"] == proof["result_pairing"]["verdict"] == "confirmed"
    assert proof["logits"]["max_difference"] <= printed(r"largest difference of a logit (\S+)")
