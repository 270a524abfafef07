"""The `ropeway` command as a user meets it: exit codes, one clear line, and chat from a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, LiveServer, ServerFactory
from tests.scripted_server import launch


def ropeway(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWAY_")} | environment
    command = [sys.executable, "-m", "server", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=REPOSITORY, env=settings, timeout=60)


@pytest.fixture(scope="module")
def scripted(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = launch(tiny_model(), tmp_path_factory.mktemp("cli") / "server.log", "--api-key", "secret")
    server.wait_ready()
    yield server
    server.stop()


def test_help_lists_the_commands_and_every_setting() -> None:
    assert all(name in ropeway("--help").stdout for name in ("serve", "chat", "convert", "verify", "bench"))
    text = ropeway("serve", "--help").stdout
    assert "--kv-cache-memory" in text and "ROPEWAY_KV_CACHE_MEMORY" in text and "MODEL" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["serve", "--device", "tpu"], "not one of auto, cpu, cuda"),
        (["serve", "--api-key", ""], "--api-key: an empty value"),
        (["serve", "--unknown-flag"], "ropeway serve: error: unrecognized arguments: --unknown-flag"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], message: str) -> None:
    done = ropeway(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_wrong_environment_is_2() -> None:
    done = ropeway("serve", ROPEWAY_PAGE_SIZE="four")
    assert done.returncode == 2 and "ROPEWAY_PAGE_SIZE: 'four'" in done.stderr


def test_a_model_that_is_not_there_is_1() -> None:
    done = ropeway("serve", "/no/such/model", "--port", "0")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ropeway: no model at /no/such/model")


def test_a_file_that_is_no_model_is_1(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a model")
    done = ropeway("serve", str(file), "--port", "0", ROPEWAY_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "notes.txt" in done.stderr


def test_a_bench_without_the_key_is_told_which_flag_has_it(scripted: LiveServer) -> None:
    done = ropeway("bench", scripted.url, "--concurrency", "1")
    assert done.returncode == 1 and "401" in done.stderr and "give a key with --api-key" in done.stderr


def test_chat_works_from_a_pipe(scripted: LiveServer) -> None:
    done = ropeway("chat", scripted.url, text="hello\n\n/new\nagain\n/exit\nnever\n", ROPEWAY_API_KEY="secret,other")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["user: hello", "user: again"]


def test_chat_passes_the_temperature_on(scripted: LiveServer) -> None:
    hot = ropeway("chat", scripted.url, "--temperature", "-1", text="hello\n", ROPEWAY_API_KEY="secret")
    assert hot.returncode == 1 and "temperature" in hot.stderr
    cold = ropeway("chat", scripted.url, "--temperature", "0", text="hello\n", ROPEWAY_API_KEY="secret")
    assert cold.returncode == 0 and cold.stdout == "user: hello\n"


def test_a_misspelled_setting_is_pointed_at() -> None:
    done = ropeway("serve", "/no/such/model", ROPEWAY_PROT="1", ROPEWAY_MAX_NUM_SEQ="4", ROPEWAY_OF_MY_OWN="x")
    first, second, _ = done.stderr.splitlines()
    assert first == "ropeway: ROPEWAY_MAX_NUM_SEQ is not a setting: did you mean ROPEWAY_MAX_NUM_SEQS?"
    assert second == "ropeway: ROPEWAY_PROT is not a setting: did you mean ROPEWAY_PORT?"


def test_chat_says_why_it_cannot(scripted: LiveServer) -> None:
    refused = ropeway("chat", scripted.url, text="hello\n")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "API key" in refused.stderr
    absent = ropeway("chat", "http://127.0.0.1:9", text="hello\n")
    assert absent.returncode == 1 and absent.stderr.count("\n") == 1 and "`ropeway serve`" in absent.stderr
    no_scheme = ropeway("chat", "127.0.0.1:8000")
    assert no_scheme.returncode == 1 and "expected something like http://" in no_scheme.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantization", "int8"], "--quantization int8: needs the native CPU kernels; here are torch operations"),
        (["--quantization", "int4", "--dtype", "float16"], "--quantization int4: needs the native CPU kernels"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2: a model is served by 1 device"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_not_ignored(
    tiny_model: Callable[..., Path], flags: list[str], message: str
) -> None:
    done = ropeway("serve", str(tiny_model()), "--port", "0", *flags, ROPEWAY_KERNELS="off")
    assert done.returncode == 1 and done.stderr.startswith(f"ropeway: {message}") and done.stderr.count("\n") == 1


def test_ctrl_c_at_any_moment_of_the_start_ends_without_a_traceback(tiny_model: Callable[..., Path]) -> None:
    """Once as soon as the port is open, when the child is being born, and once when the engine's first file is read."""
    for marker in ("spawn_main", "torch"):
        command = [sys.executable, "-m", "server", "serve", str(tiny_model()), "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, start_new_session=True
        )
        assert process.stdout is not None and "listening" in process.stdout.readline()
        wait_for_child(process, marker)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == 0 and "Traceback" not in rest and "KeyboardInterrupt" not in rest, rest


def wait_for_child(process: subprocess.Popen[str], marker: str) -> None:
    """Until a child's command line or memory map names `marker`, for at most 30 s."""
    deadline = time.monotonic() + 30
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while time.monotonic() < deadline:
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if any(marker in Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "maps")):
                    return
    raise AssertionError(f"no child with {marker}")


def test_serve_runs_a_real_model_and_ends_with_0(
    server_factory: ServerFactory, tiny_model: Callable[..., Path]
) -> None:
    live = server_factory(
        tiny_model(), "--page-size", "4", "--kv-cache-memory", "512KiB", env={"ROPEWAY_MAX_MODEL_LEN": "64"}
    )
    children = Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text().split()
    [engine] = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    http_maps, engine_maps = (Path(f"/proc/{pid}/maps").read_text() for pid in (live.process.pid, engine))
    assert "torch" not in http_maps and "torch" in engine_maps
    assert "pydantic_core" in http_maps and "pydantic_core" not in engine_maps
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(30) == 0
    assert not Path(f"/proc/{engine}").exists()
