"""LLM in this process: the same output as the server's, in a batch or alone; clear errors; nothing left behind."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tqdm import tqdm

from server.offline import LLM
from server.offline_output import Output
from server.service import StartupError
from tests.conftest import EOS, REPOSITORY, LiveServer
from tests.test_prepare import write_pickles

SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
PROMPTS: list[Any] = ["abc", [*b"hello"], "a longer prompt than the others", "abc"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    before = torch.get_num_threads()
    with LLM(tiny_model("llama"), page_size=4, kv_cache_memory="512KiB", threads=1) as llm:
        yield llm
    torch.set_num_threads(before)


def same(one: Output, other: Output) -> bool:
    return [(c.text, c.token_ids, c.logprobs) for c in one.choices] == [
        (c.text, c.token_ids, c.logprobs) for c in other.choices
    ]


def ask(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


# ---- the same output


def test_output_is_the_servers(llm: LLM, live_server: LiveServer) -> None:
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, SEEDED, use_tqdm=False), strict=True):
        reply = ask(live_server, "/v1/completions", prompt=prompt, **SEEDED)
        (choice,) = reply["choices"]
        assert (output.text, output.finish_reason) == (choice["text"], choice["finish_reason"])
        assert output.logprobs is not None and len(output.token_ids) == SEEDED["max_tokens"]
        assert [entry.logprob for entry in output.logprobs] == choice["logprobs"]["token_logprobs"]
        assert output.usage.prompt_tokens == reply["usage"]["prompt_tokens"]
        assert output.usage.completion_tokens == reply["usage"]["completion_tokens"]


def test_chat_is_the_servers(llm: LLM, live_server: LiveServer) -> None:
    params = {"seed": 3, "max_tokens": 12, "n": 2, "stop": ["\n", "e"]}
    (output,) = llm.chat(HI, params, use_tqdm=False)
    reply = ask(live_server, "/v1/chat/completions", messages=HI, **params)
    assert [(c.text, c.finish_reason, c.stop_reason) for c in output.choices] == [
        (choice["message"]["content"], choice["finish_reason"], choice.get("stop_reason"))
        for choice in reply["choices"]
    ]
    assert [same(one, output) for one in llm.chat([HI, HI], params, use_tqdm=False)] == [True, True]


def test_in_a_batch_as_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
    alone = [llm.generate([prompt], SEEDED, use_tqdm=False)[0] for prompt in PROMPTS]
    assert all(map(same, together, alone))
    assert same(together[0], together[3]) and together[0].text != together[1].text


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short, long = llm.generate(["abc", "abc"], [SEEDED | {"max_tokens": 3}, SEEDED], use_tqdm=False)
    assert long.token_ids[:3] == short.token_ids and len(long.token_ids) == 24


def test_one_text_or_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    (text,), (ids,) = (llm.generate(prompt, SEEDED, use_tqdm=False) for prompt in ("abc", [*b"abc"]))
    assert same(text, ids)
    assert llm.generate([], SEEDED) == []


# ---- ends


def test_a_stop_string_ends_the_request_and_frees_its_pages(llm: LLM) -> None:
    (whole,) = llm.generate("abc", SEEDED, use_tqdm=False)
    stop = whole.text[4:7]
    (output,) = llm.generate("abc", SEEDED | {"stop": stop, "max_tokens": 400}, use_tqdm=False)
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.choices[0].stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and len(output.token_ids) < 24
    assert output.usage.kv_peak_bytes > 0 and output.usage.kv_byte_seconds > 0


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(
    chain_model: Callable[[dict[int, int]], Path],
) -> None:
    with LLM(chain_model({ord("c"): EOS}), kv_cache_memory=1 << 20, threads=1) as chained:
        (output,) = chained.generate("a", {"temperature": 0}, use_tqdm=False)
    assert (output.text, output.token_ids, output.finish_reason) == ("bc", [*b"bc", EOS], "stop")


def test_prompt_logprobs_and_choices(llm: LLM) -> None:
    (output,) = llm.generate("abc", {"max_tokens": 2, "n": 3, "prompt_logprobs": 1, "seed": 1}, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [entry.token for entry in output.prompt_logprobs[1:] if entry] == [*b"bc"]
    assert len(output.choices) == 3 and output.logprobs is None


def test_structured_output_needs_no_second_process(llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    (output,) = llm.generate("abc", {"structured_outputs": {"regex": "[ab]{3}"}}, use_tqdm=False)
    assert re.fullmatch("[ab]{3}", output.text) and output.finish_reason == "stop"
    with pytest.raises(ValueError, match=r"prompt 0: structured_outputs: .*invalid regex"):
        llm.generate("abc", {"structured_outputs": {"regex": "[ab"}})
    assert multiprocessing.active_children() == []


# ---- errors


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 600}, "prompt 1: max_tokens: 600 with a prompt of 3 tokens makes 603, .* holds 512"),
        ({"temprature": 0}, "prompt 1: temprature: there is no such field"),
        ({"temperature": -1}, r"prompt 1: temperature: .* \(got -1\)"),
        ({"stream": True}, "prompt 1: stream: only a server offers this"),
        ({"suffix": "x"}, "prompt 1: suffix: no model served here fills in the middle"),
    ],
)
def test_a_wrong_field_is_named_before_anything_runs(llm: LLM, params: dict[str, Any], message: str) -> None:
    steps = llm._opened().step().stats.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(["abc", "abc"], [{}, params])
    assert llm._opened().step().stats.steps == steps


def test_a_wrong_prompt_is_named(llm: LLM) -> None:
    too_long: list[Any] = ["abc", [1] * 600]
    with pytest.raises(ValueError, match="prompt 1: prompt: 600 tokens, but this model holds 512"):
        llm.generate(too_long)
    with pytest.raises(ValueError, match="prompt 0: prompt: token id 999 is outside the vocabulary"):
        llm.generate([[999]])
    with pytest.raises(ValueError, match="2 prompts with 3 sets of params"):
        llm.generate(["a", "b"], [{}, {}, {}])


def test_wrong_settings_are_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="LLM has no setting 'port'; there are attention_backend, batch_"):
        LLM(tiny_model("llama"), port=1)
    with pytest.raises(ValueError, match="--device tpu: not one of auto, cpu, cuda"):
        LLM(tiny_model("llama"), device="tpu")
    with pytest.raises(StartupError, match="no model at"):
        LLM(tmp_path / "nothing")


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bar: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tqdm, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abcd"], [{"max_tokens": 2}, {"max_tokens": 400}])
    monkeypatch.undo()
    engine = llm._opened()
    assert not engine.has_work and not any(pool.num_active for pool in engine.tables.pools)
    assert len(llm.generate("abc", SEEDED, use_tqdm=False)[0].token_ids) == 24


def test_a_closed_one_says_so(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(tiny_model("llama"), kv_cache_memory=1 << 20, threads=1)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc")


def test_the_example_of_the_documentation_runs(tiny_model: Callable[..., Path]) -> None:
    """As a script without a main guard, which a spawned process would run again."""
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "offline.md").read_text(), re.DOTALL)
    script = code.replace('"MODEL"', repr(str(tiny_model("llama"))))
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " 12\n" in done.stdout and "prompt" in done.stderr, "no progress bar"


def test_every_engine_setting_is_in_the_documentation() -> None:
    from server.offline import ENGINE_SETTINGS

    text = (REPOSITORY / "docs" / "offline.md").read_text()
    assert [name for name in ENGINE_SETTINGS if f"`{name}" not in text] == []


def test_a_conversion_is_told_as_a_servers_is(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROPEWAY_CACHE", str(tmp_path / "cache"))
    LLM(write_pickles(tmp_path / "pickles", tiny_model()), page_size=4, kv_cache_memory="512KiB", threads=1).close()
    assert "ropeway: conversion: " in capsys.readouterr().err
