"""The arrows between the packages, as the design draws them."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = ("server", "model", "convert")
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "model": ("server", "convert"),
    "convert": ("server",),
    "server/engine": (
        *("fastapi", "starlette", "uvicorn", "tokenizers", "convert"),
        *("server.app", "server.client", "server.routes", "server.loadtest", "server.measure"),
    ),
    "server/offline.py": ("fastapi", "starlette", "uvicorn", "server.app", "server.client", "server.routes"),
    "server/loadtest": ("torch", "tokenizers", "model", "convert", "fastapi", "server.engine", "server.client"),
}
HOLDS_TENSORS = ("torch", "model.decoder", "model.kv_cache", "model.ops", "server.engine.core")


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def sources(name: str) -> list[Path]:
    """Of a folder, or one file."""
    path = REPOSITORY / name
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def crossings(paths: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in paths
        for name in imports_of(path)
        if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)
    ]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows(folder: str) -> None:
    assert crossings(sources(folder), FORBIDDEN[folder]) == []


def test_the_http_side_holds_no_tensors() -> None:
    with_tensors = {"engine", "measure", "offline.py"}
    outside = [path for path in sources("server") if with_tensors.isdisjoint(path.relative_to(REPOSITORY).parts)]
    assert crossings(outside, HOLDS_TENSORS) == []


def test_routes_are_the_apps_alone() -> None:
    inside = [path for path in sources("server") if "routes" not in path.parts and path.name != "app.py"]
    assert crossings(inside, ("server.routes",)) == []


def test_init_files_are_empty() -> None:
    init_files = [path for folder in OURS for path in sources(folder) if path.name == "__init__.py"]
    assert [str(path) for path in init_files if path.stat().st_size] == []


def test_every_module_says_its_job() -> None:
    modules = [path for folder in (*OURS, "tests") for path in sources(folder) if path.name != "__init__.py"]
    assert [str(path) for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_two_modules_import_each_other() -> None:
    modules = {module_name(path): path for folder in OURS for path in sources(folder)}
    graph = {name: set(imports_of(path)) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_messages_load_without_torch() -> None:
    assert "torch" not in loaded_by("import server.engine.messages")


def test_costs_load_without_torch_or_numpy() -> None:
    assert not {"torch", "numpy"} & loaded_by("import model.kv_cost")


def test_scripts_load_no_web_framework() -> None:
    assert not {"fastapi", "starlette", "uvicorn"} & loaded_by("import server.offline")
