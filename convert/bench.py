"""`python -m convert.bench FOLDER`: memory and speed of a conversion, on a large synthetic checkpoint made there.

Knows nothing of how the conversion works. Prints the peak of anonymous memory beside its limit (three times the largest
tensor and 300 MB) and the write phase beside `dd` of the same bytes; exit code 1 if either is over its limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.pipeline import convert

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256
LARGEST = VOCABULARY * HIDDEN * 2
LIMIT = 3 * LARGEST + 300_000_000
WRITE_RATIO = 1.5
SAMPLE_SECONDS = 0.01

Shape = tuple[int, ...]


def tensors(layers: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a Mistral-format model with adjacent pairs, so that Q and K have to be permuted."""
    kv = HIDDEN * KV_HEADS // HEADS
    yield "tok_embeddings.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"layers.{layer}."
        yield from ((f"{prefix}{name}.weight", (HIDDEN,)) for name in ("attention_norm", "ffn_norm"))
        yield from ((f"{prefix}attention.{name}.weight", (HIDDEN, HIDDEN)) for name in ("wq", "wo"))
        yield from ((f"{prefix}attention.{name}.weight", (kv, HIDDEN)) for name in ("wk", "wv"))
        yield from ((f"{prefix}feed_forward.{name}.weight", (INNER, HIDDEN)) for name in ("w1", "w3"))
        yield f"{prefix}feed_forward.w2.weight", (HIDDEN, INNER)
    yield "norm.weight", (HIDDEN,)
    yield "output.weight", (VOCABULARY, HIDDEN)


def write_source(folder: Path, layers: int) -> None:
    """bf16 noise, the same 64 MB over and over from changing places."""
    folder.mkdir(parents=True)
    params = {
        "dim": HIDDEN, "n_layers": layers, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
        "hidden_dim": INNER, "vocab_size": VOCABULARY, "norm_eps": 1e-5, "rope_theta": 1e6,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    rows, sizes = {}, [2 * int(np.prod(shape)) for _, shape in tensors(layers)]
    for index, (name, shape) in enumerate(tensors(layers)):
        offsets = [sum(sizes[:index]), sum(sizes[: index + 1])]
        rows[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
    header = json.dumps(rows).encode()
    noise = np.random.default_rng(0).standard_normal(1 << 25, np.float32) * np.float32(0.02)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with (folder / "consolidated.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for index, left in enumerate(sizes):
            start = 2 * 4099 * index
            while left:
                piece = block[start % len(block) :][:left]
                file.write(piece)
                start, left = 0, left - len(piece)


def measured_conversion(source: Path, destination: Path) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and peak of RssAnon (bytes) by phase, of a conversion in this process."""
    phase, peaks, done = "opening", dict[str, int](), threading.Event()

    def progress(what: str, written: int, total: int) -> None:
        nonlocal phase
        phase = what

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peaks[phase] = max(peaks.get(phase, 0), anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        report = convert(source, destination, progress=progress)
    finally:
        done.set()
        sampler.join()
    assert report is not None
    return report["seconds"], peaks


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def copy_seconds(folder: Path, target: Path) -> float:
    """What `dd bs=16M conv=fsync` takes for the weights of `folder`."""
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        command = ["dd", f"if={file}", f"of={target}", "bs=16M", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)
    return time.perf_counter() - start


def main() -> int:
    """Make, convert, copy, compare, clean up."""
    parser = argparse.ArgumentParser("python -m convert.bench", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder to make, on the disk to measure; removed at the end")
    parser.add_argument("--layers", type=int, default=14, help="14 layers are 8.2 GB")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        return run(args.folder, args.layers)
    finally:
        shutil.rmtree(args.folder)


def run(folder: Path, layers: int) -> int:
    """The figures of one run; 1 if a limit is broken."""
    nbytes = sum(2 * int(np.prod(shape)) for _, shape in tensors(layers))
    if (free := shutil.disk_usage(folder).free) < 3.1 * nbytes:
        print(f"needs {3.1 * nbytes:,.0f} bytes of disk, {free:,} are free")
        return 1
    write_source(folder / "source", layers)
    seconds, peaks = measured_conversion(folder / "source", folder / "out")
    copy = copy_seconds(folder / "out", folder / "copy")
    ratio, peak = seconds["weights"] / copy, max(peaks.values())
    print(f"{nbytes / 1e9:.1f} GB, largest tensor {LARGEST / 1e9:.2f} GB")
    print("seconds: " + ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items()))
    print(f"write phase {ratio:.2f} times dd ({copy:.1f} s), limit {WRITE_RATIO}")
    print("peak RssAnon: " + ", ".join(f"{phase} {value / 1e6:,.0f} MB" for phase, value in peaks.items()))
    print(f"peak {peak / 1e6:,.0f} MB, limit {LIMIT / 1e6:,.0f} MB")
    return int(ratio > WRITE_RATIO or peak > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
