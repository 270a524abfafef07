"""`ropeway bench` as a user runs it, against the mock server in a process of its own."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from server.loadtest.__main__ import main
from server.loadtest.kv import parse_metrics
from server.loadtest.options import parser
from tests.conftest import REPOSITORY

SHORT = ["--num-requests", "6", "--output-len", "6", "--quiet", "--max-lag", "10s"]


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    command = [sys.executable, "-m", "server.loadtest.mock", "--port", "0", "--ttft", "0.005", "--gap", "0.001"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


class Checker(HTMLParser):
    """Collects what a page would fetch, and its charts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        self.fetched += [tag] if tag in ("script", "link", "iframe") else []


def test_every_output_at_once(mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "markdown", "html", "requests")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main([mock, "--concurrency", "1,3", "--slo", "ttft=10s", *SHORT, *outputs]) == 0
    shown = capsys.readouterr().out
    assert "concurrency 3" in shown
    assert "TTFT: first token - sent" in shown
    result = json.loads(files["json"].read_text())
    assert [run["label"] for run in result["runs"]] == ["concurrency 1", "concurrency 3"]
    assert [run["requests"]["ok"] for run in result["runs"]] == [6, 6]
    assert result["runs"][0]["load"]["kind"] == "closed loop"
    assert result["runs"][0]["cache"]["agrees"] is True
    assert result["runs"][0]["kv"]["preemptions"] == 0
    assert result["definitions"]["tpot"].startswith("(last token - first token)")
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["concurrency 1", "concurrency 3"]
    assert files["markdown"].read_text().startswith("| load")
    assert len(files["requests"].read_text().splitlines()) == 12
    checker = Checker()
    checker.feed(files["html"].read_text())
    assert checker.fetched == []
    assert checker.charts >= 6


def test_json_alone_on_standard_output(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([mock, "--rate", "50", *SHORT, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["load"]["kind"] == "open loop"


def test_a_reader_that_goes_away_costs_no_file(mock: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "markdown", "html")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    command = [sys.executable, "-m", "server", "bench", mock, "--concurrency", "1", *SHORT, "--json", "-", *outputs]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert all(path.stat().st_size for path in files.values())


def test_a_full_disk_costs_no_table(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left"):
        main([mock, "--concurrency", "1", *SHORT, "--markdown", "/dev/full"])
    assert "concurrency 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra",
    [
        ["--concurrency", "2", "--prompts", "ids"],
        ["--concurrency", "2", "--turns", "2", "--think", "1ms"],
        ["--concurrency", "2", "--cache", "warm", "--distinct", "3", "--input-len", "64"],
        ["--concurrency", "2", "--shared-prefix", "groups=2,len=64"],
        ["--rate", "20:80", "--arrivals", "gamma:0.5"],
        ["--sweep", "--most-users", "4"],
        ["--concurrency", "2", "--repeat", "2"],
    ],
)
def test_every_mode_ends_well(mock: str, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([mock, *SHORT, *extra]) == 0
    assert "ok/sent" in capsys.readouterr().out


def test_a_warm_cache_is_warm_by_the_servers_count(mock: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    warm = ["--cache", "warm", "--distinct", "2", "--input-len", "64", "--concurrency", "1"]
    assert main([mock, *SHORT, *warm, "--json", str(out)]) == 0
    cache = json.loads(out.read_text())["runs"][0]["cache"]
    assert cache["cached_share"] > 0.5
    assert cache["agrees"] is True


def test_two_servers_are_compared(mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    both = ["--compare", f"A={mock}", f"B={mock}", "--concurrency", "2", "--repeat", "2", "--html", str(page)]
    assert main([*both, *SHORT]) == 0
    assert "ratio to A" in capsys.readouterr().out
    assert "B against A" in page.read_text()


def test_the_capacity_is_searched(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["--find-capacity", "--slo", "ttft=10s", "--start-rate", "200", "--probe", "100ms", "--budget", "1s"]
    assert main([mock, *search, *SHORT]) == 0
    assert "capacity under ttft=10s" in capsys.readouterr().out


def test_a_saved_run_is_replayed(mock: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main([mock, "--rate", "50", *SHORT, "--save-trace", str(trace)]) == 0
    assert len(trace.read_text().splitlines()) == 6
    assert main([mock, "--trace", str(trace), "--quiet", "--max-lag", "10s"]) == 0


def test_a_run_limited_by_the_client_fails(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No machine wakes up within a nanosecond."""
    assert main([mock, "--concurrency", "1", *SHORT, "--max-lag", "0.000000001"]) == 1
    assert "LIMITED BY THIS CLIENT" in capsys.readouterr().out


def test_failures_fail_the_command_and_are_shown(mock: str, capsys: pytest.CaptureFixture[str]) -> None:
    fault = ["--extra-body", '{"mock": {"fault": "stream_error"}}']
    assert main([mock, "--concurrency", "1", *SHORT, *fault]) == 1
    assert "6 failed: stream_error (the mock failed, as asked)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "name a server"),
        (["http://h", "--slo", "foo"], "expected METRIC=DURATION"),
        (["http://h", "--concurrency", "0"], "from 1 up"),
        (["http://h", "--find-capacity"], "needs --slo"),
        (["http://h", "--sweep", "--trace", "x"], "choose one of"),
        (["--compare", "A=http://h"], "at least two"),
        (["http://h", "--turns", "2", "--api", "completions"], "--api chat"),
        (["http://h", "--json", "/no/such/folder/x.json"], "no folder"),
        (["http://h", "--duration", "1s", "--num-requests", "5"], "either"),
        (["http://h", "--timeout", "0s"], "argument --timeout: duration '0s': must be above 0"),
        (["http://h", "--output-len", "0"], "argument --output-len: length '0': expected a whole number from 1 up"),
        (["http://h", "--extra-body", "{"], "argument --extra-body: '{': not JSON (Expecting property name"),
        (["http://h", "--prompts", "/nope"], "--prompts (neither words nor ids): no file /nope"),
        (["http://h", "--trace", "/nope"], "--trace: no file /nope"),
        (["http://h", "--save-trace", "/no/such/folder/x", "--rate", "1"], "no folder /no/such/folder"),
    ],
)
def test_wrong_usage_is_2_and_says_what(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["http://127.0.0.1:1"], "cannot connect"),
        (["ftp://somewhere"], "not a server address"),
    ],
)
def test_a_refusal_is_1_and_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_metrics_are_read_under_both_names() -> None:
    text = """# HELP vllm:kv_cache_usage_perc x
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:num_preemptions_total{engine="0"} 3
vllm:num_preemptions_total{engine="1"} 4
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",x="y"} 1.0
ropeway_kv_pool_bytes{kind="predicted"} 1
ropeway_kv_pool_bytes{kind="allocated",engine="0"} 1048576
"""
    values = parse_metrics(text)
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:num_preemptions_total"] == 7
    assert (values["block_size"], values["num_gpu_blocks"]) == (16, 100)
    assert values["ropeway_kv_pool_bytes[allocated]"] == 1048576


def test_plots_without_matplotlib_are_refused_before_the_run(
    mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.loadtest.__main__.find_spec", lambda name: None)
    assert main([mock, *SHORT, "--plots", str(tmp_path / "p")]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "ropeway bench: --plots needs matplotlib: pip install 'ropeway[plot]'\n"


def test_help_says_every_default_and_what_every_value_is() -> None:
    for action in parser()._actions:
        has_default = action.default not in (None, False, "", argparse.SUPPRESS) and action.default != {}
        assert not has_default or "default" in str(action.help), action.option_strings
        assert action.nargs == 0 or not action.option_strings or action.metavar or action.choices, action.option_strings


def test_a_run_shorter_than_the_readings_does_not_claim_an_idle_pool(
    mock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    assert main([mock, "--concurrency", "2", *SHORT, "--json", str(out), "--html", str(page)]) == 0
    assert "pool use not sampled, the run was shorter than a second" in capsys.readouterr().out
    kv = json.loads(out.read_text())["runs"][0]["kv"]
    assert (kv["usage_mean"], kv["usage_peak"]) == (None, None) and kv["points"]
    assert "goodput/s" not in page.read_text().split("Definitions")[0], "a column without an objective"
