"""What other people's tools say of our metrics: promtool's linter, a real Prometheus, the dashboard and the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.client import EngineClient
from server.engine.facts import EngineConfig
from server.metrics import Metrics
from tests.conftest import LiveServer, free_port
from tests.scripted_engine import info

DOCKER = Path(__file__).resolve().parent.parent / "docker"
FORCED_BY_VLLMS_NAMES = (
    r"vllm:\w+ metric names should not contain ':'",
    r"vllm:iteration_tokens_total non-counter metrics should not have \"_total\" suffix",
)
"""Complaints about names that everybody already reads; there is no other way to serve them."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path


def rendered() -> str:
    client = EngineClient(EngineConfig("x"))
    client.info = info(client.config)
    client.stats = client.info.stats_at_start()
    return Metrics("m", lambda: client).render().decode()


def test_promtool_finds_only_what_vllms_names_force() -> None:
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=rendered(), capture_output=True, text=True)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    forced = [line for line in complaints if any(re.fullmatch(known, line) for known in FORCED_BY_VLLMS_NAMES)]
    assert complaints == forced
    assert len(forced) > 10, "promtool has checked nothing"


def names() -> set[str]:
    families = text_string_to_metric_families(rendered())
    return {sample.name for family in families for sample in family.samples}


def expressions(value: Any) -> Iterator[str]:
    """Every "expr" in a dashboard, and the queries of its variables."""
    if isinstance(value, dict):
        yield from (found for key in ("expr", "definition") if isinstance(found := value.get(key), str))
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from expressions(item)


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|ropeway_)\w+", text))


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((DOCKER / "grafana/provisioning/dashboards/ropeway.json").read_text())
    asked = [metrics_in(expression) for expression in expressions(board)]
    assert len(asked) > 20 and all(asked)
    assert set[str]().union(*asked) - names() == set()


def test_the_dashboard_reads_the_provisioned_datasource() -> None:
    board = (DOCKER / "grafana/provisioning/dashboards/ropeway.json").read_text()
    source = (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    (uid,) = re.findall(r"uid: (\w+)", source)
    assert set(re.findall(r'"type": "prometheus",\s*"uid": "(\w+)"', board)) == {uid}


def test_alerts_ask_for_metrics_that_exist() -> None:
    assert metrics_in((DOCKER / "prometheus/alerts.yml").read_text()) - names() == set()


@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_alerts_fire_when_they_should(command: list[str]) -> None:
    done = subprocess.run(
        [tool("promtool"), *command], cwd=DOCKER / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_mounts_what_prometheus_is_told_to_read() -> None:
    compose = (DOCKER / "compose.yaml").read_text()
    for file in ("prometheus.yml", "alerts.yml"):
        assert f"./prometheus/{file}:/etc/prometheus/{file}:ro" in compose and (DOCKER / "prometheus" / file).exists()


@pytest.fixture
def prometheus(live_server: LiveServer, tmp_path: Path) -> Iterator[str]:
    """A Prometheus with the shipped settings, but for the target and the pace; the address of its API."""
    shutil.copy(DOCKER / "prometheus/alerts.yml", tmp_path)
    config = (DOCKER / "prometheus/prometheus.yml").read_text()
    config = config.replace("ropeway:8000", live_server.url.removeprefix("http://")).replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    port = free_port()
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen(
        [tool("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    )
    yield f"http://127.0.0.1:{port}/api/v1"
    process.kill()
    process.wait()


def ask(api: str, expression: str) -> list[dict[str, Any]]:
    try:
        reply = httpx.get(f"{api}/query", params={"query": expression}, timeout=10)
    except httpx.TransportError:
        return []  # it is still starting
    found: list[dict[str, Any]] = reply.json()["data"]["result"] if reply.status_code == 200 else []
    return found


@pytest.mark.slow
def test_a_real_prometheus_scrapes_a_real_server(prometheus: str, live_server: LiveServer) -> None:
    deadline = time.monotonic() + 120
    while not ask(prometheus, "up == 1"):
        assert time.monotonic() < deadline, "Prometheus has not scraped the server"
        time.sleep(0.2)
    (total,) = ask(prometheus, "sum(ropeway_kv_pages)")
    (facts,) = ask(prometheus, "vllm:cache_config_info")
    assert int(float(total["value"][1])) == int(facts["metric"]["num_gpu_blocks"])
    rules = httpx.get(f"{prometheus}/rules").json()["data"]["groups"]
    assert all(rule["health"] in ("ok", "unknown") for group in rules for rule in group["rules"])
    assert len(ask(prometheus, "vllm:time_to_first_token_seconds_bucket")) == 23
