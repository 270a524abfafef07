"""The pool against its prediction, and the memory the system grants and commits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from model.memory import GIB, available_bytes, default_pool_bytes, resident_bytes, rss_bytes

LAYOUT = KVLayout(4, (KVGroup((0, 2), None, 2, 8, "float32"), KVGroup((1,), 6, 2, 8, "bfloat16")))
MIB = 1 << 20


def test_allocated_is_what_was_predicted() -> None:
    for pages in ((1, 1), (5, 3), (17, 2)):
        assert KVCache(LAYOUT, pages, "cpu").nbytes == LAYOUT.pool_bytes(pages)


def test_layers_are_views_of_their_group() -> None:
    cache = KVCache(LAYOUT, (5, 3), "cpu")
    for storage in cache.storages:
        storage.zero_()
    cache.layer(2).k.fill_(1)
    assert [cache.group_of(layer) for layer in range(3)] == [0, 1, 0]
    assert cache.layer(0).k.shape == cache.layer(0).v.shape == (5, 2, 4, 8)
    assert cache.layer(1).v.dtype == torch.bfloat16
    assert cache.storages[0].sum() == cache.layer(2).k.numel()
    assert cache.layer(0).page_size == 4


def test_pages_commit_on_first_touch() -> None:
    """In a process of its own: memory that another test freed may come back, and that is resident already."""
    code = (
        "from model.kv_cache import KVCache; from model.kv_cost import KVGroup, KVLayout\n"
        "from model.memory import resident_bytes\n"
        "cache = KVCache(KVLayout(16, (KVGroup(tuple(range(8)), None, 4, 64, 'float32'),)), (256,), 'cpu')\n"
        "address = cache.storages[0].data_ptr()\n"
        "untouched = resident_bytes(address, cache.nbytes)\n"
        "cache.storages[0].zero_()\n"
        "print(untouched, resident_bytes(address, cache.nbytes), cache.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    untouched, touched, allocated = map(int, done.stdout.split())
    assert untouched < allocated // 8
    assert touched >= allocated


def test_own_memory() -> None:
    assert resident_bytes(0, 0) == 0
    assert rss_bytes() > MIB
    assert 0 < available_bytes() < 1 << 50


def fake_system(root: Path, membership: str, available: int = 64 * GIB, **files: str) -> Path:
    """A tree with /proc and, per keyword cgroup path with __ for /, the given files as 'name=value' words."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/").strip("_")
        folder.mkdir(parents=True, exist_ok=True)
        for word in ["memory.stat=", *text.split()]:
            file, value = word.split("=")
            (folder / file).write_text(f"{value.replace(':', ' ')}\n".lstrip())
    return root


def test_without_cgroups_the_system_decides(tmp_path: Path) -> None:
    assert available_bytes(fake_system(tmp_path, "0::/\n", 3 * GIB)) == 3 * GIB


def test_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = fake_system(
        tmp_path,
        "0::/slice/app\n",
        slice=f"memory.max={4 * GIB} memory.current={3 * GIB} memory.stat=inactive_file:{GIB}",
        slice__app="memory.max=max memory.current=5",
    )
    assert available_bytes(root) == 2 * GIB


def test_version_1_counts_inactive_file_cache_as_free(tmp_path: Path) -> None:
    usage = f"memory.usage_in_bytes={2 * GIB} memory.stat=total_inactive_file:{GIB}"
    root = fake_system(
        tmp_path,
        "5:cpu,memory:/docker/abc\n0::/\n",
        memory="memory.limit_in_bytes=9223372036854771712 memory.usage_in_bytes=0",
        memory__docker__abc=f"memory.limit_in_bytes={3 * GIB} {usage}",
    )
    assert available_bytes(root) == 2 * GIB


def test_in_a_container_the_mount_is_our_own_cgroup(tmp_path: Path) -> None:
    """The path that /proc names is outside the namespace; the limit is in the mount's root."""
    root = fake_system(tmp_path, "0::/outside/x\n", _=f"memory.max={GIB} memory.current={GIB // 4}")
    assert available_bytes(root) == 3 * GIB // 4


def test_over_its_limit_means_nothing_left(tmp_path: Path) -> None:
    root = fake_system(tmp_path, "0::/a\n", a=f"memory.max={GIB} memory.current={2 * GIB}")
    assert available_bytes(root) == 0


@pytest.mark.parametrize(
    ("available", "useful", "pool"),
    [(8 * GIB, 100 * GIB, 2 * GIB), (64 * GIB, 100 * GIB, 4 * GIB), (64 * GIB, GIB, GIB)],
)
def test_default_pool(available: int, useful: int, pool: int) -> None:
    assert default_pool_bytes(available, useful) == pool
