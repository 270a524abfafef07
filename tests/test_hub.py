"""MODEL as a hub id, against a hub on this machine: what is fetched, what is kept, and one clear line for each failure.

huggingface_hub reads its environment once, so every environment is a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conftest import BASE_CONFIG, REPOSITORY, random_tensors
from tests.convert_quantisers import CASES
from tests.convert_sources import write_gguf
from tests.fake_hub import FakeHub, serving
from tests.test_convert_quantised import write_quantised

FETCH = """
import sys
from convert.errors import ConvertError
from server.prepare import canonical_folder, check_exists
from server.service import StartupError
for model in sys.argv[1:]:
    try:
        check_exists(model)
        print(canonical_folder(model, lambda news: None))
    except (StartupError, ConvertError) as error:
        print("refused:", error)
"""


@pytest.fixture
def repository(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model, and what usually stands beside one."""
    folder = tmp_path / "repository"
    shutil.copytree(tiny_model(), folder)
    (folder / "original").mkdir()
    for name in ("README.md", "pytorch_model.bin", "model.onnx", "consolidated.safetensors", "original/params.json"):
        (folder / name).write_bytes(b"not wanted")
    (folder / "setup.py").write_text("raise SystemExit('code of strangers')")
    return folder


def fetch(hub: FakeHub, tmp_path: Path, *models: str, **environment: str) -> list[str]:
    """A line for each model, org/name if none is said: a folder, or `refused:` and the reason."""
    places = {"HF_HOME": str(tmp_path / "hf"), "ROPEWAY_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", FETCH, *(models or ["org/name"])]
    env = hidden | places | {"HF_HUB_DISABLE_XET": "1"} | environment
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(models or ["org/name"])
    return lines


def test_only_weights_configs_and_tokenizers_are_fetched_and_then_kept(repository: Path, tmp_path: Path) -> None:
    wanted = ["chat_template.jinja", "config.json", "generation_config.json"]
    wanted += ["model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    with serving(FakeHub(repository)) as hub:
        folder, again = fetch(hub, tmp_path, "org/name", "org/name")
        assert sorted(hub.fetched) == wanted and again == folder
    assert (Path(folder) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    kept, missing = fetch(hub, tmp_path, "org/name", "org/other", HF_HUB_OFFLINE="1")
    assert kept == folder and "HF_HUB_OFFLINE forbids to fetch it" in missing
    kept, missing = fetch(hub, tmp_path, "org/name", "org/other")  # the hub is down by now
    assert kept == folder
    assert (
        missing == f"refused: org/other is not here, and {hub.url} cannot be reached: check the network and HF_ENDPOINT"
    )


def test_a_quantised_repository_is_converted(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    said, quantise = CASES["fp8 blocks"]
    want = write_quantised(tmp_path / "repository", said, quantise)
    shutil.copy(tiny_model() / "tokenizer.json", tmp_path / "repository")
    with serving(FakeHub(tmp_path / "repository")) as hub:
        [folder] = fetch(hub, tmp_path)
    assert Path(folder).parent == tmp_path / "cache"
    assert load_file(Path(folder) / "model.safetensors").keys() == want.keys()


def test_the_token_is_sent(repository: Path, tmp_path: Path) -> None:
    with serving(FakeHub(repository, token="hf_secret")) as hub:
        [without] = fetch(hub, tmp_path)
        [folder] = fetch(hub, tmp_path, HF_TOKEN="hf_secret")
    assert "refused: no model at org/name" in without and Path(folder).is_dir()


def test_what_is_not_there_and_what_is_closed(repository: Path, tmp_path: Path) -> None:
    with serving(FakeHub(repository, gated=True)) as hub:
        missing, gated, *paths = fetch(hub, tmp_path, "org/other", "org/name", "a/b/c", "folder/")
    assert missing.endswith(f"neither a path here nor a repository at {hub.url} (a private one needs HF_TOKEN)")
    assert "org/name is gated: accept its terms at" in gated and "set HF_TOKEN" in gated
    assert all("give a folder, a model file or a hub id" in path for path in paths) and len(paths) == 2


def test_a_connection_that_is_cut(repository: Path, tmp_path: Path) -> None:
    with serving(FakeHub(repository, cut="model.safetensors")) as hub:
        [refused] = fetch(hub, tmp_path)
        hub.cut = None
        [folder] = fetch(hub, tmp_path)
    assert "org/name could not be fetched from" in refused
    assert (Path(folder) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_a_repository_without_safetensors(repository: Path, tmp_path: Path) -> None:
    (repository / "model.safetensors").unlink()
    with serving(FakeHub(repository)) as hub:
        [refused] = fetch(hub, tmp_path)
    assert "has no config.json with *.safetensors" in refused


def test_an_endpoint_that_is_no_hub(repository: Path, tmp_path: Path) -> None:
    with serving(FakeHub(repository, other=True)) as hub:
        [refused] = fetch(hub, tmp_path)
    assert refused == f"refused: {hub.url} answered 404 for org/name: check the name and HF_ENDPOINT"


def test_a_model_without_a_tokenizer_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    config = BASE_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}
    source = write_gguf(tmp_path / "model.gguf", config, random_tensors(config))
    [refused] = fetch(FakeHub(tmp_path), tmp_path, str(source))
    advice = "no tokenizer in it: put tokenizer.json or tokenizer.model beside the weights"
    assert refused == f"refused: {source}: {advice}" and not (tmp_path / "cache").exists()
