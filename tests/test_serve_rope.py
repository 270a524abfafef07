"""Scaled positions behind HTTP: what a client gets for a prompt is what transformers computes for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from server.plan.__main__ import main as main_plan
from tests.conftest import ModelFactory, ServerFactory
from tests.test_decoder import some_tokens

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.1, 2.0, 6.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PHI3 = {"pad_token_id": 0, "partial_rotary_factor": 0.75, "sliding_window": 90, "rope_scaling": LONGROPE}
CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("phi3", PHI3 | {"original_max_position_embeddings": 64}, 512, "the long factors serve every request"),
    ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 64}, 200, ""),
]


def prompt_logprobs_of_transformers(folder: Path, tokens: list[int]) -> list[float]:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, tokens[1:], strict=False)]


@pytest.mark.parametrize(("kind", "keys", "length", "said"), CASES, ids=["phi3-longrope", "qwen2-yarn"])
def test_prompt_logprobs_over_http(
    kind: str, keys: dict[str, Any], length: int, said: str, tiny_model: ModelFactory, server_factory: ServerFactory
) -> None:
    """Prompts over the original context, with yarn over max_position_embeddings too, since --max-model-len asks it."""
    folder, tokens = tiny_model(kind, **keys), some_tokens(150)
    server = server_factory(folder, "--max-model-len", str(length), "--dtype", "float32")
    body = {"prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    got = reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]
    assert got == pytest.approx(prompt_logprobs_of_transformers(folder, tokens), abs=1e-3)
    assert said in server.output


def test_plans_of_scaled_models(tiny_model: ModelFactory, capsys: pytest.CaptureFixture[str]) -> None:
    kind, keys, length, _ = CASES[1]
    assert main_plan([str(tiny_model(kind, **keys)), "--memory", "2GiB", "--context", str(length)]) == 0
    assert main_plan([str(tiny_model(kind, **keys)), "--memory", "2GiB", "--context", "257"]) == 1
    assert "positions for 256 tokens" in capsys.readouterr().err
