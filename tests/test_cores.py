"""Cores that this process may use, from fake cgroup trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server.engine.cores import usable_cores
from tests.conftest import REPOSITORY, ServerFactory

AFFINITY = len(os.sched_getaffinity(0))


def tree(root: Path, membership: str, **quotas: str) -> Path:
    """A file system in which the cgroup `name` (mount: the topmost) has this cpu.max."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, quota in quotas.items():
        folder = root / "sys/fs/cgroup" / ("" if name == "mount" else name.replace("__", "/"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quota)
    return root


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == AFFINITY
    assert usable_cores(tree(tmp_path / "a", "0::/job\n", job="max 100000")) == AFFINITY


def test_the_tightest_quota_up_to_the_mount_counts_and_is_rounded_up(tmp_path: Path) -> None:
    nested = tree(tmp_path / "a", "0::/slice/job\n", slice__job="max 100000", slice="50000 100000")
    assert usable_cores(nested) == 1
    assert usable_cores(tree(tmp_path / "b", "0::/\n", mount="30000 100000")) == 1
    assert usable_cores(tree(tmp_path / "c", "0::/\n", mount="150000 100000")) == min(AFFINITY, 2)


def test_quotas_of_other_hierarchies_are_not_ours(tmp_path: Path) -> None:
    assert usable_cores(tree(tmp_path, "4:cpu:/job\n", job="50000 100000")) == AFFINITY


SCRIPT = """
import sys
from server.offline import LLM
with LLM(sys.argv[1], page_size=4, kv_cache_memory="512KiB") as llm:
    print(llm.info.threads)
"""


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_an_openmp_that_ties_threads_to_cores_leaves_the_engine_all_of_them(
    server_factory: ServerFactory, tiny_model: Callable[..., Path]
) -> None:
    """OpenMP ties the thread that loads it to one core: who counts cores afterwards finds one."""
    tied = {"OMP_PROC_BIND": "true"}
    server = server_factory(tiny_model(), "--page-size", "4", "--kv-cache-memory", "512KiB", env=tied)
    assert httpx.get(f"{server.url}/version").json()["threads"] == usable_cores()
    command = [sys.executable, "-c", SCRIPT, str(tiny_model())]
    done = subprocess.run(command, env=os.environ | tied, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(done.stdout) == usable_cores()
