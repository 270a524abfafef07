"""Our figures beside those of other load generators on the same mock server, where a quantity shares its definition.

Optional: ROPEWAY_VLLM and ROPEWAY_GUIDELLM name the commands (each in an environment of its own), ROPEWAY_TOKENIZER a
folder with a tokenizer, which both of them need. Timed: run on a quiet machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.loadtest.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REQUESTS, USERS, INPUT, OUTPUT = 100, 4, 64, 32


def needs(*variables: str) -> pytest.MarkDecorator:
    missing = [variable for variable in variables if not os.environ.get(variable)]
    return pytest.mark.skipif(bool(missing), reason=f"not set: {', '.join(missing)}")


@pytest.fixture
def mock() -> Iterator[str]:
    command = [sys.executable, "-m", "server.loadtest.mock", "--port", "0", "--ttft", "0.2", "--gap", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.fixture
def ours(mock: str, tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "ours.json"
    load = ["--concurrency", str(USERS), "--num-requests", str(REQUESTS), "--max-lag", "1s"]
    assert (
        main([mock, *load, "--input-len", str(INPUT), "--output-len", str(OUTPUT), "--quiet", "--json", str(out)]) == 0
    )
    run: dict[str, Any] = json.loads(out.read_text())["runs"][0]
    return run


@needs("ROPEWAY_VLLM", "ROPEWAY_TOKENIZER")
def test_vllm_bench_serve(mock: str, ours: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's ITL is our chunk gap; its latencies start after its semaphore, as ours do at `sent`."""
    out = tmp_path / "vllm.json"
    load = [
        "--num-prompts",
        str(REQUESTS),
        "--max-concurrency",
        str(USERS),
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    ]
    data = ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    where = ["--base-url", mock, "--model", "mock", "--tokenizer", os.environ["ROPEWAY_TOKENIZER"], "--ignore-eos"]
    command = [os.environ["ROPEWAY_VLLM"], "bench", "serve", "--backend", "openai", *where, *data, *load]
    subprocess.run([*command, "--num-warmups", "1", "--save-result", "--result-filename", str(out)], check=True)
    theirs, latency = json.loads(out.read_text()), ours["latency"]
    for name, key in (("ttft", "ttft"), ("tpot", "tpot"), ("chunk_gap", "itl"), ("e2e", "e2el")):
        assert latency[name]["mean"] * 1000 == pytest.approx(theirs[f"mean_{key}_ms"], rel=0.03), name
        assert latency[name]["p50"] * 1000 == pytest.approx(theirs[f"median_{key}_ms"], rel=0.03), name
    assert ours["rates"]["request_rate"] == pytest.approx(theirs["request_throughput"], rel=0.03)
    assert ours["rates"]["output_rate"] == pytest.approx(theirs["output_throughput"], rel=0.03)


@needs("ROPEWAY_GUIDELLM", "ROPEWAY_TOKENIZER")
def test_guidellm(mock: str, ours: dict[str, Any], tmp_path: Path) -> None:
    """guidellm's ITL is our TPOT, its time per output token our NTPOT."""
    out = tmp_path / "guidellm.json"
    where = ["--backend", f"kind=openai_http,target={mock},request_format=/v1/completions"]
    load = ["--profile", f"kind=concurrent,streams={USERS}", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    tokenizer = ["--tokenizer", f"kind=hf_auto,model={os.environ['ROPEWAY_TOKENIZER']}"]
    data = ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    output = ["--output", f"kind=json,path={out}", "--disable-console"]
    subprocess.run([os.environ["ROPEWAY_GUIDELLM"], "run", *where, *load, *tokenizer, *data, *output], check=True)
    metrics, latency = json.loads(out.read_text())["benchmarks"][0]["metrics"], ours["latency"]
    pairs = (
        ("ttft", "time_to_first_token_ms", 1000),
        ("tpot", "inter_token_latency_ms", 1000),
        ("ntpot", "time_per_output_token_ms", 1000),
        ("e2e", "request_latency", 1),
    )
    for name, key, scale in pairs:
        found = metrics[key]["successful"]
        assert latency[name]["mean"] * scale == pytest.approx(found["mean"], rel=0.03), name
        assert latency[name]["p50"] * scale == pytest.approx(found["median"], rel=0.03), name
