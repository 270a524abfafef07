"""Suites and clients that other people wrote, against a real server with the tiny model. `make test-clients` runs them.

They live in an environment of their own (the extra `clients`); what is not installed is skipped by name.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import LiveServer, ModelFactory, start_server

pytestmark = pytest.mark.clients
HI = [{"role": "user", "content": "hi"}]
JAVASCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "k", maxRetries: 0 });
const ask = { model: "m", messages: [{ role: "user", content: "hi" }], max_tokens: 8, seed: 1, ignore_eos: true };
const whole = await client.chat.completions.create(ask);
let text = "";
const stream = await client.chat.completions.create({ ...ask, stream: true });
for await (const chunk of stream)
  text += chunk.choices[0]?.delta?.content ?? "";
const items = { model: "m", input: "hi", max_output_tokens: 8, seed: 1, ignore_eos: true };
const response = await client.responses.create(items);
let events = 0;
for await (const event of await client.responses.create({ ...items, stream: true }))
  events += 1;
const vectors = await client.embeddings.create({ model: "m", input: ["a", "b"] });
let refusal = null;
try { await client.completions.create({ model: "m", prompt: "x", temperature: -1 }); }
catch (error) { refusal = error.status; }
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, text, response: response.output_text, events,
  dimensions: vectors.data.map((item) => item.embedding.length), refusal,
}));
"""


@pytest.fixture(scope="module")
def live(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("clients") / "server.log"
    server = start_server(tiny_model(), log, "--served-model-name", "m", "--kv-cache-memory", "16MiB")
    server.wait_ready()
    yield server
    assert "Traceback" not in server.output
    assert server.stop() == 0


def test_schemathesis(live: LiveServer, tmp_path: Path) -> None:
    """Requests made from our OpenAPI, good and bad: no 5xx, no undocumented status, bodies as the schema says."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    settings = tmp_path / "schemathesis.toml"
    settings.write_text("")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [f"{live.url}/openapi.json", "--checks", checks, "--max-examples", "15", "--phases", "examples,fuzzing"]
    command += ["--exclude-path", "/kv/stream", "--seed", "1", "--generation-database", "none"]
    command += ["--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert httpx.get(f"{live.url}/readyz").status_code == 200


def test_openai_python(live: LiveServer) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0)
    ask = {"model": "m", "messages": HI, "max_tokens": 8, "seed": 1, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 8


def test_openai_javascript(live: LiveServer, tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", "openai@6"]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"npm could not install openai: {done.stderr[-200:]}")
    (tmp_path / "try.mjs").write_text(JAVASCRIPT)
    done = subprocess.run(["node", "try.mjs", live.url], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["whole"] == seen["text"] == seen["response"] and seen["events"] > 5
    assert seen["dimensions"] == [48, 48] and seen["refusal"] == 400


@pytest.mark.filterwarnings("default")
def test_litellm(live: LiveServer) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    where = {"api_base": f"{live.url}/v1", "api_key": "k", "num_retries": 0}
    ask = {"model": "openai/m", "messages": HI, "max_tokens": 8, "seed": 1, "ignore_eos": True} | where
    whole = litellm.completion(**ask)
    chunks = list(litellm.completion(stream=True, logprobs=True, **ask))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    vectors = litellm.embedding(model="openai/m", input=["a"], encoding_format="float", **where)
    assert len(vectors.data[0]["embedding"]) == 48


@pytest.mark.filterwarnings("default")
def test_langchain_openai(live: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    settings: Any = {"base_url": f"{live.url}/v1", "api_key": "k", "model": "m", "max_retries": 0}
    chat = langchain.ChatOpenAI(max_tokens=8, seed=1, extra_body={"ignore_eos": True}, **settings)
    whole = chat.invoke("hi")
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream("hi")) == whole.content
    vectors = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **settings).embed_documents(["a", "b"])
    assert [len(vector) for vector in vectors] == [48, 48]


@pytest.mark.filterwarnings("default")
def test_anthropic(live: LiveServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(base_url=live.url, api_key="k", max_retries=0)
    ask = {"model": "m", "messages": HI, "max_tokens": 8, "extra_body": {"seed": 1, "ignore_eos": True}}
    whole = client.messages.create(**ask)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 8
    counted = client.messages.count_tokens(model="m", messages=HI).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**(ask | {"model": "claude"}))
