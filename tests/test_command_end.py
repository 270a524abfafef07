"""Commands that are broken off: Ctrl-C ends with 130 and one line, a file that fails with 1 and one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.atomic import partial_of
from tests.conftest import BASE_CONFIG, REPOSITORY, random_tensors
from tests.convert_sources import write_gguf
from tests.test_cli import ropeway

WIDE = BASE_CONFIG | {"hidden_size": 256, "intermediate_size": 4000, "num_attention_heads": 8, "head_dim": 32}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "model.gguf", WIDE, random_tensors(WIDE))


def interrupt(arguments: list[str], reached: Callable[[int], bool]) -> str:
    """Ctrl-C as soon as `reached` says so of the process id; what it printed, which is no traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do children
    command = [sys.executable, "-m", "server", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while not reached(process.pid):
        assert process.poll() is None and time.monotonic() < deadline, "ended before it could be interrupted"
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in text and "KeyboardInterrupt" not in text, text
    return text.splitlines()[-1]


def loaded(library: str) -> Callable[[int], bool]:
    return lambda pid: library in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_ctrl_c_while_modules_are_imported(command: str, gguf: Path, tmp_path: Path) -> None:
    line = interrupt([command, str(gguf), *([str(tmp_path / "out")] * (command == "convert"))], loaded("numpy"))
    assert line.startswith(f"ropeway {command}: interrupted")


def test_ctrl_c_while_a_conversion_writes_says_how_to_go_on(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def has_two_shards(pid: int) -> bool:
        return len(list(partial_of(out).glob("*.safetensors"))) > 1

    line = interrupt(["convert", str(gguf), str(out), "--max-shard-size", "1MB"], has_two_shards)
    finished = line.removeprefix("ropeway convert: interrupted: ").partition(" ")[0]
    assert int(finished) >= 1
    assert line.endswith(f"finished in {partial_of(out)}; run the same command again to go on")
    again = ropeway("convert", str(gguf), str(out), "--max-shard-size", "1MB")
    assert again.returncode == 0
    assert f"going on where an interrupted conversion stopped: {finished} file" in again.stderr


def test_ctrl_c_while_a_checkpoint_is_exported_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    line = interrupt(["convert", str(gguf), str(out), "--to", "gguf"], lambda pid: partial_of(out).exists())
    assert line == "ropeway convert: interrupted" and list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_server_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        asking: list[socket.socket] = []

        def has_asked(pid: int) -> bool:
            asking.append(listener.accept()[0])
            return True

        line = interrupt(["bench", url, "--quiet"], has_asked)
        assert line == "ropeway bench: interrupted: no report is made; --requests FILE keeps what had ended"
        asking.pop().close()


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.mkdir()
    done = ropeway("plan", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"ropeway plan: {weights}: Is a directory: name a file\n"


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    picture = tmp_path / "none" / "a.png"
    done = ropeway("plan", str(tiny_model()), "--plot", str(picture))
    assert (done.returncode, done.stderr) == (
        1,
        f"ropeway plan: {picture}: No such file or directory: check the path\n",
    )


@pytest.mark.parametrize("command", ["plan", "plan --json", "convert --json", "verify --json"])
def test_a_reader_that_goes_away_ends_a_command_in_silence(
    command: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The text is longer than what is kept before it is written, or not."""
    name, *options = command.split()
    arguments = {"plan": [tiny_model()], "convert": [tiny_model(), tmp_path / "out"], "verify": [tiny_model()]}
    reader, writer = os.pipe()
    os.close(reader)
    whole = [sys.executable, "-m", "server", name, *map(str, arguments[name]), *options]
    done = subprocess.run(whole, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
