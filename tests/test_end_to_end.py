"""The whole road with a real engine: what other tests show with a scripted one, once more with a model behind it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import LiveServer, start_server

HI = [{"role": "user", "content": "hi"}]
ENDLESS: dict[str, Any] = {"prompt": "abc", "max_tokens": 15000, "ignore_eos": True}
SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(live_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def complete(http: httpx.Client, prompt: Any = "abc", **body: Any) -> dict[str, Any]:
    return post(http, "/v1/completions", prompt=prompt, **body)


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def running(http: httpx.Client) -> tuple[float, float]:
    """Sequences in the engine: running, waiting."""
    lines = http.get("/metrics").text.splitlines()
    values = [
        float(line.rsplit(" ", 1)[1])
        for name in ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        for line in lines
        if line.startswith(name)
    ]
    return values[0], values[1]


def wait_for(http: httpx.Client, at_most: tuple[float, float], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while any(seen > limit for seen, limit in zip(running(http), at_most, strict=True)):
        assert time.monotonic() < deadline, f"still {running(http)} running and waiting"
        time.sleep(0.02)


# ---- the same tokens


def test_seeded_output_is_the_same_alone_in_a_batch_and_streamed(http: httpx.Client) -> None:
    alone = [texts(complete(http, prompt, **SEEDED))[0] for prompt in ("abc", "hello", "x")]
    assert texts(complete(http, ["abc", "hello", "x"], **SEEDED)) == alone
    with ThreadPoolExecutor() as pool:
        together = pool.map(lambda prompt: texts(complete(http, prompt, **SEEDED))[0], ("abc", "hello", "x"))
        assert list(together) == alone
    assert texts(complete(http, "abc", **(SEEDED | {"seed": 8}))) != alone[:1]


def test_n_choices_differ_and_each_comes_back_by_its_own(http: httpx.Client) -> None:
    reply = complete(http, ["abc", "xyz"], n=2, **SEEDED)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(reply))) == 4
    assert texts(reply)[:2] == texts(complete(http, "abc", n=2, **SEEDED))


def test_a_stop_string_cuts_the_text_it_ends(http: httpx.Client) -> None:
    whole = texts(complete(http, **SEEDED))[0]
    stop = whole[6:9]
    reply = complete(http, stop=["never seen", stop], **SEEDED)
    [choice] = reply["choices"]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop and reply["usage"]["completion_tokens"] < SEEDED["max_tokens"]
    assert reply["timings"]["predicted_ms"] > 0


@pytest.mark.fault
def test_no_number_a_client_may_send_is_too_large_for_the_engine(http: httpx.Client) -> None:
    reply = complete(http, top_k=2**70, temperature=1e6, min_tokens=2, allowed_token_ids=[97, 98])
    assert set(texts(reply)[0]) <= {"a", "b"} and reply["usage"]["completion_tokens"] >= 2
    reply = complete(http, repetition_penalty=0.01, frequency_penalty=-2, logit_bias={"97": 100}, timeout=1e300)
    assert set(texts(reply)[0]) == {"a"}


def test_best_of_sends_the_likeliest(http: httpx.Client) -> None:
    all_four = complete(http, n=4, logprobs=0, **SEEDED)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / SEEDED["max_tokens"] for choice in all_four]
    best = complete(http, n=1, best_of=4, **SEEDED)["choices"]
    assert [choice["text"] for choice in best] == [all_four[means.index(max(means))]["text"]]


# ---- log-probabilities of output and prompt


def test_echo_scores_the_prompt_as_generation_does(http: httpx.Client) -> None:
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    made = complete(http, [*b"abcd"], **greedy)["choices"][0]["logprobs"]
    again = complete(http, [*b"abcd"], echo=True, **greedy)["choices"][0]["logprobs"]
    assert again["token_logprobs"][0] is None and len(again["tokens"]) == 10
    assert again["token_logprobs"][4:] == made["token_logprobs"] and again["top_logprobs"][4:] == made["top_logprobs"]
    assert again["text_offset"] == sorted(again["text_offset"])


def test_prompt_logprobs_are_keyed_by_token(http: httpx.Client) -> None:
    reply = complete(http, "abc", max_tokens=1, temperature=0, prompt_logprobs=3, echo=True, logprobs=1)
    [choice] = reply["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None and 3 <= len(second) <= 4
    assert second[str(ord("b"))]["decoded_token"] == "b"
    assert third[str(ord("c"))]["logprob"] == choice["logprobs"]["token_logprobs"][2]
    assert sorted(entry["rank"] for entry in second.values() if entry["rank"]) == [1, 2, 3]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"] if top), "echo keeps its own number"
    chat = post(http, "/v1/chat/completions", messages=HI, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


# ---- numbers without generating


def test_embeddings_by_the_official_client(live_server: LiveServer, http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    asked: Any = {"model": model, "input": ["abc", "abd"]}
    packed = [item.embedding for item in client.embeddings.create(**asked).data]  # base64, the client's own choice
    plain = [item.embedding for item in client.embeddings.create(encoding_format="float", **asked).data]
    assert packed == [pytest.approx(vector, abs=1e-6) for vector in plain]
    assert len(plain[0]) == 48 and plain[0] != plain[1]
    assert sum(value * value for value in plain[0]) == pytest.approx(1, abs=1e-5)
    reply = post(http, "/v1/embeddings", input=[*b"abc"])
    assert reply["pooling"] == "last" and reply["data"][0]["embedding"] == pytest.approx(plain[0], abs=1e-6)
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    mean = post(http, "/v1/embeddings", input="abc", pooling="mean")
    assert mean["pooling"] == "mean" and mean["data"][0]["embedding"] != pytest.approx(plain[0], abs=1e-3)
    for body in ({"input": ""}, {"input": "a", "pooling": "max"}, {"input": "a", "dimensions": 8}, {"input": [259]}):
        assert http.post("/v1/embeddings", json=body).status_code == 400


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    reply = post(http, "/tokenize", prompt="h\u00e9<|eos|>", return_token_strs=True)
    assert reply["tokens"] == [*"h\u00e9".encode(), 257] and reply["count"] == 4 and reply["max_model_len"] == 512
    assert reply["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|eos|>"]
    assert post(http, "/detokenize", tokens=reply["tokens"]) == {"prompt": "h\u00e9<|eos|>"}
    chat = post(http, "/tokenize", messages=HI)
    assert chat["count"] == post(http, "/v1/chat/completions", messages=HI, max_tokens=1)["usage"]["prompt_tokens"]
    assert http.post("/detokenize", json={"tokens": [259]}).status_code == 400
    assert http.post("/tokenize", json={}).json()["error"]["message"].endswith("send either prompt or messages")


# ---- the books in the reply


def test_cached_tokens_of_a_batch_are_summed_and_timings_add_up(http: httpx.Client) -> None:
    prompt = "a prompt that fills some pages of four tokens"
    salt = {"cache_salt": "cached", "max_tokens": 3, "ignore_eos": True}
    assert complete(http, prompt, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reply = complete(http, [prompt, prompt, "other"], **salt)
    once = len(prompt) // 4 * 4
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * once
    assert reply["timings"]["cache_n"] == 2 * once and reply["timings"]["predicted_n"] == 9
    assert reply["timings"]["prompt_n"] + 2 * once == reply["usage"]["prompt_tokens"]
    other = complete(http, prompt, **(salt | {"cache_salt": "of somebody else"}))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_timings_come_on_the_last_event_of_a_stream(http: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": "abc", "stream": True} | SEEDED | options
    blocks = http.post("/v1/completions", json=body).content.split(b"\n\n")[:-2]
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in blocks]
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"]["predicted_n"] == SEEDED["max_tokens"]


# ---- clients that leave, deadlines, the end of the server


@pytest.fixture(scope="module")
def narrow(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One sequence runs at a time, with room for long ones."""
    log = tmp_path_factory.mktemp("narrow") / "server.log"
    flags = ("--max-num-seqs", "1", "--drain-timeout", "0.5")
    server = start_server(tiny_model("llama", max_position_embeddings=20000), log, *flags)
    server.wait_ready()
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.mark.fault
def test_a_client_that_leaves_is_ended_in_every_phase(narrow: LiveServer) -> None:
    """The first request decodes, the second waits, the third is in prefill; each client hangs up."""
    with httpx.Client(base_url=narrow.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as decoding:
            next(decoding.iter_lines())
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=ENDLESS, timeout=0.3)
            wait_for(http, at_most=(1, 0))
        wait_for(http, at_most=(0, 0))
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"prompt": "z" * 19000, "max_tokens": 1}, timeout=0.3)
        wait_for(http, at_most=(0, 0))
        assert complete(http, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_deadlines_and_drain(narrow: LiveServer) -> None:
    """Ends its server."""
    with httpx.Client(base_url=narrow.url, timeout=60) as http:
        cut = complete(http, **(ENDLESS | {"timeout": 0.4}))
        assert cut["choices"][0]["finish_reason"] == "length" and "timeout" in cut["warnings"][0]
        assert 0 < cut["usage"]["completion_tokens"] < ENDLESS["max_tokens"]
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            late = http.post("/v1/completions", json=ENDLESS | {"queue_timeout": 0.2})
            assert late.status_code == 503 and late.json()["error"]["code"] == "queue_timeout"
            narrow.process.send_signal(signal.SIGTERM)
            data = [line for line in lines if line]
        assert json.loads(data[-2].removeprefix("data: "))["error"]["code"] == "drain" and data[-1] == "data: [DONE]"
    assert narrow.process.wait(30) == 0


# ---- the official client


def test_openai_client_sync_and_async(live_server: LiveServer) -> None:
    settings: Any = {"base_url": f"{live_server.url}/v1", "api_key": "none", "max_retries": 0}
    model = httpx.get(f"{live_server.url}/v1/models").json()["data"][0]["id"]
    messages: Any = HI
    ask: Any = {"model": model, "messages": messages, "seed": 3, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = openai.OpenAI(**settings).chat.completions.create(**ask)
    assert whole.usage is not None and whole.usage.completion_tokens == 12

    async def stream_it() -> str:
        async with openai.AsyncOpenAI(**settings) as client:
            chunks = await client.chat.completions.create(stream=True, **ask)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(stream_it()) == whole.choices[0].message.content
