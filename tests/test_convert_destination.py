"""Where a conversion goes: what is in the way, cannot be written or is being made is one line that names it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert.__main__ import main_convert
from convert.atomic import exclusive, partial_of
from convert.detect import open_source
from convert.journal import Journal, plan_digest
from convert.plan import make_plan
from convert.report import CONVERTER_VERSION
from tests.conftest import BASE_CONFIG, REPOSITORY, random_tensors
from tests.convert_sources import write_gguf

CONFIG = BASE_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG))


@pytest.mark.parametrize(
    ("destination", "to", "words"),
    [
        ("model.gguf/out", "hf", "cannot be made there, nothing is left ({}/model.gguf is a file): name another place"),
        ("model.gguf", "gguf", "exists already: name a new file"),
        ("link", "hf", "exists already (a link): name a new folder"),
        ("/proc/out", "hf", "cannot be made there, nothing is left (No such file or directory): name another place"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_its_name(
    destination: str, to: str, words: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert main_convert([str(gguf), str(tmp_path / destination), "--to", to]) == 1
    assert capsys.readouterr().err == f"ropeway convert: {tmp_path / destination}: {words.format(tmp_path)}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model.gguf"]


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_write_that_fails_names_the_destination_and_leaves_nothing(to: str, gguf: Path, tmp_path: Path) -> None:
    """No file may be longer than 16 KiB, which the weights are: the write itself fails, as on a full disk."""
    out = tmp_path / "a" / "b" / "out"
    command = shlex.join([sys.executable, "-m", "server", "convert", str(gguf), str(out), "--to", to])
    limited = ["bash", "-c", f"ulimit -f 16; exec {command}"]
    done = subprocess.run(limited, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    line = f"ropeway convert: {out}: cannot be made there, nothing is left (File too large): name another place\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_read_that_fails_is_not_the_fault_of_the_destination(tmp_path: Path) -> None:
    """The first page of a process cannot be read, and the system's error names no file."""
    with pytest.raises(OSError, match="Input/output error") as caught, exclusive(tmp_path / "out", print):
        Path("/proc/self/mem").read_bytes()
    assert caught.value.filename is None


def test_a_refused_conversion_leaves_no_folder_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"][0] = np.nan
    source = write_gguf(tmp_path / "model.gguf", CONFIG, tensors)
    assert main_convert([str(source), str(tmp_path / "a" / "b" / "out")]) == 1
    assert "holds NaN or inf" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("to", ["hf", "gguf", "meta"])
def test_of_two_that_make_one_place_the_second_is_told(gguf: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "server", "convert", str(gguf), str(out), "--to", to]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    with exclusive(out, print):
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting for another process that makes {out}\n"
        out.mkdir()
    last = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert last.startswith(f"ropeway convert: {out}: another process made it meanwhile, of this checkpoint or of ano")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("other", ["source", "shard size"])
def test_what_another_conversion_left_is_not_gone_on_with(
    other: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = tmp_path / "out", open_source(gguf)
    plan = plan_digest(source, make_plan(source), 1000, CONVERTER_VERSION) if other == "shard size" else "of another"
    partial_of(out).mkdir()
    Journal(partial_of(out), plan).add("model-00001-of-00002.safetensors", {})
    assert main_convert([str(gguf), str(out)]) == 0
    assert capsys.readouterr().err.startswith(f"beginning anew: {partial_of(out)} held an interrupted conversion")
    assert {path.name for path in out.iterdir()} == {"config.json", "conversion_report.json", "model.safetensors"}
