"""Faults that users of other engines met, each with the input of its report: batches, windows, prefix caches.

A real engine on a tiny model; a report's numbers are kept, its model is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.messages import Row, SamplingParams, Submit
from server.offline import LLM
from tests.conftest import PAD
from tests.real_engine import Setup, run

Make = Callable[..., Path]
GREEDY = SamplingParams(6, temperature=0.0, logprobs=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def said(rows: list[Row], name: str) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of one request, row by row."""
    return [(row.tokens, row.logprobs, row.prompt_logprobs, row.finish) for row in rows if row.id == name]


def asked(prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> list[Submit]:
    return [Submit(name, Submit.pack(prompt), params) for name, prompt in prompts.items()]


# ---- batches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_equal_requests_in_one_batch_are_the_one_alone(tiny_model: Make, dtype: str) -> None:
    """jundot/omlx 3476: batched rows agreed among themselves, not with the solo run."""
    prompts = {name: [7, 1, 100, 42, 3] for name in "abcd"}
    together = run(Setup(prefix_caching=False, dtype=dtype).engine(tiny_model()), *asked(prompts))
    alone = run(Setup(prefix_caching=False, dtype=dtype).engine(tiny_model()), asked(prompts)[0])
    for name in prompts:
        assert said(together, name) == said(alone, "a")


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("pad", [0, 32, PAD])
def test_shorter_prompts_do_not_see_what_fills_the_batch(tiny_model: Make, pad: int, reference: bool) -> None:
    """TransformerLens 1005: lengths of 1, a block, and one more; the pad id is a common token of the prompts."""
    prompts = {
        f"{kind} of {length}": [pad] * length if kind == "pads" else [pad, *range(1, length)][:length]
        for length in (1, 4, 5, 16, 17)
        for kind in ("pads", "text")
    }
    setup = Setup(prefix_caching=False, reference=reference)
    params = replace(GREEDY, prompt_logprobs=1)
    together = run(setup.engine(tiny_model()), *asked(prompts, params))
    for submit in asked(prompts, params):
        assert said(together, submit.id) == said(run(setup.engine(tiny_model()), submit), submit.id)


# ---- windows


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("budget", [256, 7, 1])
def test_a_window_of_w_holds_w_tokens_and_the_last_is_one_of_them(
    tiny_model: Make, budget: int, reference: bool
) -> None:
    """transformers 39408: keys at distance W were seen. One layer, so that nothing comes round another way."""
    folder, window, length = tiny_model("mistral", num_hidden_layers=1, sliding_window=12), 12, 30

    def first_token(prompt: list[int]) -> list[tuple[object, ...]]:
        engine = Setup(budget=budget, reference=reference, prefix_caching=False).engine(folder)
        return said(run(engine, Submit("w", Submit.pack(prompt), replace(GREEDY, max_tokens=1))), "w")

    prompt = list(range(20, 20 + length))
    plain = first_token(prompt)
    for distance in (window + 1, window):
        assert first_token(changed(prompt, length - 1 - distance)) == plain, distance
    for distance in (window - 1, 0):
        assert first_token(changed(prompt, length - 1 - distance)) != plain, distance


def changed(prompt: list[int], index: int) -> list[int]:
    return [*prompt[:index], 200, *prompt[index + 1 :]]


# ---- prefix caches

FEW_SHOT = "".join(f"\nQ: {a} plus {a}?\nA: {2 * a}." for a in range(4))


def test_after_ends_at_a_stop_string_prompts_that_share_the_text_are_answered_alike(tiny_model: Make) -> None:
    """vLLM 5543: after a batch that ended on a stop string, the prefix cache changed the answers of others."""

    def answers(prefix_caching: bool) -> tuple[list[Any], int]:
        fields = {"page_size": 4, "kv_cache_memory": "512KiB", "threads": 1, "prefix_caching": prefix_caching}
        with LLM(tiny_model("llama"), **fields) as llm:
            params: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
            prompts = [f"{FEW_SHOT}\nQ: {a} plus 1?\nA:" for a in range(6)]
            free = llm.generate(prompts[0], params, use_tqdm=False)[0].text
            stops = {"stop": [free[index : index + 2] for index in (5, 9)]}
            warm = llm.generate(prompts, params | stops, use_tqdm=False)
            assert warm[0].finish_reason == "stop" and len(warm[0].text) < len(free)
            longer = [
                prompt + output.text + more for prompt, output in zip(prompts, warm, strict=True) for more in "xy"
            ]
            outputs = llm.generate([*prompts, *longer], params, use_tqdm=False)
            kept = [(c.text, c.token_ids, c.logprobs) for output in outputs for c in output.choices]
            return kept, sum(output.usage.cached_tokens for output in outputs)

    (warm, hits), (cold, none) = answers(True), answers(False)
    assert warm == cold
    assert none == 0 and hits > len(FEW_SHOT) * 12, "the cache had nothing to get wrong"
