"""From the C++ sources to a shared library: built on first use into a cache folder, or ahead of time for an image.

Knows compilers, folders and CPU flags; nothing of what the library computes.
`python -m model.ops.cpu.build --march x86-64-v3 --out DIR` builds one for a known kind of CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# No contraction: a product and a sum are rounded alike wherever the compiler inlines them.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC")
V3 = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c"))
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PREBUILT = {
    "cooperlake": V4 | {"avx512_bf16", "avx512_vnni"},
    "x86-64-v4": V4,
    "x86-64-v3": V3,
}
"""CPU flags that a library built ahead of time needs, best first. cooperlake: the first CPU with both dot products,
which Zen 4 and Sapphire Rapids have too."""


SCRATCH = "unfinished-"


class UnavailableError(Exception):
    """Why there is no native library, in one line that says what to do."""


def find_library() -> Path:
    """The library for this CPU, built now if it must be. ROPEWAY_KERNELS: 'off', or a folder of prebuilt libraries."""
    setting = os.environ.get("ROPEWAY_KERNELS", "")
    if setting == "off":
        raise UnavailableError("native kernels are off (ROPEWAY_KERNELS=off)")
    if setting and (library := _prebuilt(Path(setting))):
        return library
    compiler = find_compiler()
    folder = cache_folder()
    extra = shlex.split(os.environ.get("ROPEWAY_KERNELS_FLAGS", ""))
    flags = [*FLAGS, "-march=native", *extra]
    library = folder / f"ropeway-{_digest(compiler, flags)}.so"
    if library.exists():
        return library
    with _lock(folder):
        if not library.exists():
            remove_unfinished(folder)
            print(f"ropeway: compiling the CPU kernels into {folder}, once", file=sys.stderr, flush=True)
            compile_library(compiler, flags, library)
    return library


def find_compiler() -> list[str]:
    """$CXX, else c++, g++ or clang++ from the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]):
            return named
        raise UnavailableError(f"the compiler in CXX, {named[0]!r}, was not found: correct CXX or unset it")
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise UnavailableError("no C++ compiler: install g++ (Debian: apt install g++) or set CXX")
    return [found]


def cache_folder() -> Path:
    """$ROPEWAY_CACHE/kernels or ~/.cache/ropeway/kernels: ours alone, since code is loaded from it."""
    base = Path(os.environ.get("ROPEWAY_CACHE") or Path.home() / ".cache" / "ropeway")
    folder = base / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make {folder}: {error.strerror}; set ROPEWAY_CACHE to a folder of yours"
        ) from error
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnavailableError(
            f"{folder} can be written by others: chmod 700 it, or set ROPEWAY_CACHE to a folder of yours"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UnavailableError(f"{folder} cannot be written: set ROPEWAY_CACHE to a folder that can")
    return folder


def compile_library(compiler: list[str], flags: list[str], library: Path) -> None:
    """One object a source, side by side, then the link; the library appears whole or not at all."""
    log = library.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=library.parent) as scratch, log.open("wb") as output:
        objects = [Path(scratch) / f"{source.stem}.o" for source in _units()]
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(_units(), objects, strict=True)
        ]
        running = [subprocess.Popen(command, stdout=output, stderr=output) for command in commands]
        codes = [process.wait() for process in running]
        whole = Path(scratch) / library.name
        link = [*compiler, *flags, "-shared", *map(str, objects), "-o", str(whole)]
        if any(codes) or subprocess.run(link, stdout=output, stderr=output).returncode:
            raise UnavailableError(f"the C++ compiler failed ({_first_error(log)}): see {log}")
        whole.chmod(0o500)
        whole.replace(library)


def remove_unfinished(folder: Path) -> None:
    """What a build that was killed left behind; the caller holds the lock."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")[:200]


def _units() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(compiler: list[str], flags: list[str]) -> str:
    """Changes with the sources, the compiler, its flags and the CPU's."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    parts = (_sources_digest(), *compiler, version, *flags, platform.machine(), *sorted(cpu_flags()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, in the kernel's words."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def _prebuilt(folder: Path) -> Path | None:
    have = cpu_flags()
    for march, needed in PREBUILT.items():
        library = folder / prebuilt_name(march)
        if needed <= have and library.exists():
            return library
    return None


def prebuilt_name(march: str) -> str:
    return f"ropeway-{march}-{_sources_digest()}.so"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when the process ends, however it ends."""
    with (folder / "build.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = f"ropeway: waiting for another process that compiles the CPU kernels into {folder}"
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model.ops.cpu.build", description=__doc__)
    parser.add_argument("--march", required=True, help="what -march of the compiler takes, for example x86-64-v3")
    parser.add_argument("--out", required=True, type=Path, help="folder for the library")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    library = arguments.out / prebuilt_name(arguments.march)
    try:
        compile_library(find_compiler(), [*FLAGS, f"-march={arguments.march}"], library)
    except UnavailableError as error:
        print(error)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
