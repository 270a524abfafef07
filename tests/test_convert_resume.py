"""Kills at any byte: the next run goes on from the finished shards and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convert.__main__ import main_convert
from convert.atomic import exclusive, partial_of
from convert.cache import cache_key, ensure_canonical
from convert.detect import open_source
from convert.journal import JOURNAL, Journal
from convert.pipeline import convert
from convert.plan import Target, make_plan
from convert.write import write_tensors
from tests.conftest import BASE_CONFIG, random_tensors
from tests.convert_sources import write_gguf

CONFIG = BASE_CONFIG | {
    "hidden_size": 256, "intermediate_size": 700, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 900,
}  # fmt: skip
SHARD = 1_000_000


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "model.gguf", CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def undisturbed(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    convert(gguf, out, shard_bytes=SHARD)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Every file; of the report all but how long it took."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    report: dict[str, Any] = json.loads(found["conversion_report.json"])
    del report["seconds"]
    return found | {"conversion_report.json": json.dumps(report).encode()}


def finished_shards(partial: Path) -> dict[str, tuple[int, int]]:
    """What the journal vouches for: inode and time of its last change."""
    journal = partial / JOURNAL
    if not journal.is_file():
        return {}
    whole = journal.read_text().rpartition("\n")[0].splitlines()
    return {row["file"]: state(partial / row["file"]) for row in map(json.loads, whole[1:])}


def state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


@pytest.mark.parametrize("seed", range(3))
def test_kill_at_a_random_number_of_bytes(seed: int, gguf: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A real process, killed as soon as that many bytes lie in its folder; then once more further on."""
    total = sum(path.stat().st_size for path in undisturbed.glob("*.safetensors"))
    out = tmp_path / "out"
    dice = random.Random(seed)
    first, second = sorted(dice.randrange(total) for _ in range(2))
    start_and_kill(gguf, out, first)
    kept = finished_shards(partial_of(out))
    start_and_kill(gguf, out, second)
    assert kept.items() <= finished_shards(partial_of(out)).items()
    convert(gguf, out, shard_bytes=SHARD)
    assert {name: state(out / name) for name in kept} == kept, "a finished shard was written again"
    assert contents(out) == contents(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def start_and_kill(source: Path, out: Path, threshold: int) -> None:
    """The proof after the last byte takes long enough that the kill always comes in time."""
    command = [sys.executable, "-m", "server", "convert", str(source), str(out), "--max-shard-size", "1MB"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and written_bytes(partial_of(out)) <= threshold:
            pass
        process.kill()
    assert process.returncode == -signal.SIGKILL


def written_bytes(partial: Path) -> int:
    """-1 before there is a shard at all."""
    try:
        return sum(path.stat().st_size for path in partial.glob("*.safetensors")) or -1
    except FileNotFoundError:
        return -1


@pytest.mark.parametrize("seed", range(20))
def test_every_state_that_a_kill_can_leave(seed: int, gguf: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Some shards and their lines, then a shard or a line that stops at any byte, then other litter."""
    dice = random.Random(seed)
    targets = make_plan(open_source(gguf))
    names = sorted(path.name for path in undisturbed.glob("*.safetensors"))
    hashes = {row["target"]: row["sha256"] for row in report(undisturbed)["tensors"]}
    journal = Journal(tmp_path, "plan")
    whole = names[: dice.randrange(len(names))]
    for name in names[: len(whole) + 1]:
        shutil.copy(undisturbed / name, tmp_path)
    for name in whole:
        journal.add(name, {tensor: hashes[tensor] for tensor in tensors_in(undisturbed, name)})
    torn = tmp_path / (JOURNAL if whole and dice.random() < 0.3 else names[len(whole)])
    os.truncate(torn, dice.randrange(torn.stat().st_size))
    (tmp_path / "tokenizer.json").write_text("half")
    written: dict[str, str] = {}
    write_tensors(targets, tmp_path, collect_into(written), Journal(tmp_path, "plan"), SHARD)
    assert written == hashes
    assert {name: (tmp_path / name).read_bytes() for name in names} == {
        name: (undisturbed / name).read_bytes() for name in names
    }
    assert not (tmp_path / "tokenizer.json").exists()


def report(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "conversion_report.json").read_text())
    return value


def tensors_in(folder: Path, shard: str) -> list[str]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return [name for name, file in weight_map.items() if file == shard]


def collect_into(written: dict[str, str]) -> Any:
    def on_tensor(target: Target, digest: str) -> None:
        written[target.name] = digest

    return on_tensor


def test_a_finished_shard_with_one_wrong_byte_is_written_again(gguf: Path, undisturbed: Path, tmp_path: Path) -> None:
    targets = make_plan(open_source(gguf))
    write_tensors(targets, tmp_path, collect_into({}), Journal(tmp_path, "plan"), SHARD)
    shards = sorted(tmp_path.glob("*.safetensors"))
    times = [state(path) for path in shards]
    data = bytearray(shards[1].read_bytes())
    data[-7] ^= 1
    shards[1].write_bytes(data)
    write_tensors(targets, tmp_path, collect_into({}), Journal(tmp_path, "plan"), SHARD)
    assert shards[1].read_bytes() == (undisturbed / shards[1].name).read_bytes()
    assert [state(path) == time for path, time in zip(shards, times, strict=True)].count(False) == 1


def test_another_source_or_another_plan_starts_afresh(gguf: Path, tmp_path: Path) -> None:
    targets = make_plan(open_source(gguf))
    write_tensors(targets, tmp_path, collect_into({}), Journal(tmp_path, "plan"), SHARD)
    assert Journal(tmp_path, "plan").finished("model-00001-of-00010.safetensors") is not None
    assert Journal(tmp_path, "another plan").shards == {}
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_shard_size_of_the_command(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_convert([str(gguf), str(tmp_path / "out"), "--max-shard-size", "0.5MB"]) == 0
    assert "(tokenizer and config 0." in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 6
    with pytest.raises(SystemExit) as stop:
        main_convert([str(gguf), str(tmp_path / "b"), "--max-shard-size", "many"])
    assert stop.value.code == 2


# ---- several processes ------------------------------------------------------------------------------------


ENSURE = "import sys; from pathlib import Path; from convert.cache import ensure_canonical as e\n"
ENSURE += "print(e(Path(sys.argv[1]), Path(sys.argv[2]), lambda line: print(line, flush=True)))"


def test_a_process_that_saw_damage_does_not_remove_what_another_made_since(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = ensure_canonical(gguf, cache)
    spare = tmp_path / "spare"
    shutil.copytree(folder, spare)
    (folder / "conversion_report.json").unlink()
    command = [sys.executable, "-c", ENSURE, str(gguf), str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with exclusive(folder, print):
        assert process.stdout is not None
        assert "waiting for another process" in process.stdout.readline()
        shutil.rmtree(folder)
        spare.rename(folder)
        made = state(folder / "model.safetensors")
    process.communicate()
    assert process.returncode == 0
    assert state(folder / "model.safetensors") == made


def test_a_cache_that_cannot_be_made_is_one_line(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    command = [sys.executable, "-c", ENSURE, str(gguf), str(tmp_path / "file" / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert "cannot be made (Not a directory): set ROPEWAY_CACHE to a folder of yours" in last


def test_cache_key_is_the_contents(gguf: Path, tmp_path: Path) -> None:
    copy = shutil.copy(gguf, tmp_path / "model.gguf")
    assert cache_key(Path(copy)) == cache_key(gguf)
