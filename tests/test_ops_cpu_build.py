"""Building the native library: once per source, compiler and CPU, safely, and with a reason when it cannot be."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.ops.cpu import build
from model.ops.cpu.build import UnavailableError, find_compiler, find_library
from tests.conftest import REPOSITORY
from tests.native_ops import compiler_or_skip

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-line library and an empty cache, so that a build takes no time."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE.replace("ANSWER", "42"))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROPEWAY_KERNELS", raising=False)
    compiler_or_skip()
    return sources


def test_a_second_start_builds_nothing(small: Path) -> None:
    first = find_library()
    assert first.stat().st_mode & 0o777 == 0o500 and first.parent.stat().st_mode & 0o777 == 0o700
    written = first.stat().st_mtime_ns
    assert find_library() == first and first.stat().st_mtime_ns == written


def test_changed_sources_compiler_flags_or_cpu_build_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {find_library()}
    (small / "answer.cpp").write_text(SOURCE.replace("ANSWER", "43"))
    seen.add(find_library())
    monkeypatch.setenv("ROPEWAY_KERNELS_FLAGS", "-DUNUSED")
    seen.add(find_library())
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"another"}))
    seen.add(find_library())
    assert len(seen) == 4


def finding(sources: Path) -> list[str]:
    """A process that finds the library of these sources and prints where it lies."""
    program = "import sys; from pathlib import Path; from model.ops.cpu import build;"
    return [sys.executable, "-c", f"{program} build.SOURCES = Path({str(sources)!r}); print(build.find_library())"]


def test_who_waits_for_the_build_of_another_says_so(small: Path) -> None:
    folder = build.cache_folder()
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            finding(small), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
    text, errors = waiting.communicate()
    assert line == f"ropeway: waiting for another process that compiles the CPU kernels into {folder}\n"
    assert Path(text.strip()).exists() and errors.count("\n") == 1, "what it says next is that it compiles"


def test_concurrent_starts_build_once(small: Path, tmp_path: Path) -> None:
    """Four processes at once; a compiler that writes a line each time it is called counts the builds."""
    calls, compiler = tmp_path / "calls", tmp_path / "counting-c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {find_compiler()[0]} "$@"\n')
    compiler.chmod(0o755)

    def start(_: int) -> str:
        environment = os.environ | {"CXX": str(compiler)}
        return subprocess.run(
            finding(small), env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(start, range(4)))) == 1
    assert sum(" -c " in line for line in calls.read_text().splitlines()) == 1


def test_no_compiler_is_one_line_that_says_what_to_do(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match="install g"):
        find_library()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UnavailableError, match="/nowhere/c"):
        find_library()


def test_a_failing_compiler_names_the_error_and_the_log(small: Path) -> None:
    (small / "answer.cpp").write_text("int broken(\n")
    with pytest.raises(UnavailableError, match=r"error.*\.log") as caught:
        find_library()
    assert "\n" not in str(caught.value)
    assert not list((small.parent / "cache" / "kernels").glob("*.so"))


def test_a_folder_that_others_can_write_is_refused(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UnavailableError, match="written by others"):
        find_library()


def test_a_cache_that_cannot_be_made_is_one_line(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match="set ROPEWAY_CACHE"):
        find_library()


def test_off_means_off(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_KERNELS", "off")
    with pytest.raises(UnavailableError, match="ROPEWAY_KERNELS=off"):
        find_library()


def test_a_prebuilt_library_is_chosen_by_what_the_cpu_can(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for march in build.PREBUILT:
        (folder / build.prebuilt_name(march)).write_bytes(b"")
    monkeypatch.setenv("ROPEWAY_KERNELS", str(folder))
    for march, flags in build.PREBUILT.items():
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: flags | {"sse2"})
        assert find_library() == folder / build.prebuilt_name(march)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
    assert find_library().parent == tmp_path / "cache" / "kernels"


def test_the_image_holds_every_library_that_may_be_chosen() -> None:
    dockerfile = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert set(re.findall(r"--march (\S+)", dockerfile)) == set(build.PREBUILT)


def test_the_command_builds_for_a_named_cpu(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "--march", "native", "--out", str(tmp_path / "out")])
    assert build.main() == 0
    assert (tmp_path / "out" / build.prebuilt_name("native")).exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two builds and 700 tests, several times as slow as without
def test_the_operations_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """Address and undefined behaviour: the tests of all operations in a process that has the sanitizers loaded."""
    compiler = compiler_or_skip()
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    if not all(Path(library).is_absolute() for library in found):
        pytest.skip(f"the compiler brings no sanitizers: {' '.join(names)}")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "ROPEWAY_CACHE": str(tmp_path),
        "ROPEWAY_KERNELS_FLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += [f"tests/test_ops_cpu{part}.py" for part in ("", "_linear", "_quantised_kv", "_sampling", "_step")]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
