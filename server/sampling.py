"""From a validated body to SamplingParams: defaults, and the limits that vocabulary and context length set.

Knows one model's numbers, no HTTP beyond the error it raises.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from server.engine.messages import SamplingParams
from server.errors import bad_request, shown
from server.schemas import GenerationBody
from server.tokenizer import Tokenizer
from server.tokenizer_files import read_json

GREEDY_BELOW = 1e-5
"""A smaller temperature would overflow the scaled logits and means greedy anyway."""
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against. defaults: sampling fields that the checkpoint suggests."""

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    defaults: dict[str, float] = field(default_factory=dict)

    def check_prompt(self, tokens: list[int], name: str = "prompt") -> None:
        """One token at least must fit behind the prompt: the longest prompt is max_model_len - 1."""
        if not tokens:
            raise bad_request(f"{name}: no tokens (the tokenizer adds none of its own); send at least one", name)
        if len(tokens) >= self.max_model_len:
            raise bad_request(
                f"{name}: {len(tokens)} tokens, but this model holds {self.max_model_len} "
                f"(prompt and output), so a prompt may have {self.max_model_len - 1}",
                name,
            )
        self.check_ids(tokens, name)

    def check_ids(self, ids: list[int], name: str) -> None:
        wrong = next((id for id in (min(ids, default=0), max(ids, default=0)) if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"{name}: token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})", name)

    def output_budget(self, asked: int | None, prompt_tokens: int, default: int | None) -> int:
        """max_tokens of one choice. default None: all that is left of the context."""
        left = self.max_model_len - prompt_tokens
        if asked is None:
            return left if default is None else min(default, left)
        if asked > left:
            raise bad_request(
                f"max_tokens: {asked} with a prompt of {prompt_tokens} tokens makes {asked + prompt_tokens}, "
                f"but this model holds {self.max_model_len}; at most {left} are left",
                "max_tokens",
            )
        return asked


def sampling_defaults(folder: Path) -> dict[str, float]:
    """What generation_config.json says; do_sample false asks for greedy. ValueError if no request might say so."""
    generation = read_json(folder / "generation_config.json")
    defaults = {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
    try:
        GenerationBody.model_validate(defaults)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{folder / 'generation_config.json'}: {first['loc'][0]} is {shown(first['input'])}: {first['msg']} "
            "(--generation-defaults false leaves its sampling fields out)"
        ) from None
    return defaults | ({"temperature": 0.0} if generation.get("do_sample") is False else {})


def sampling_params(
    body: GenerationBody, limits: ModelLimits, max_tokens: int, logprobs: int | None, echo_logprobs: int | None = None
) -> SamplingParams:
    """max_tokens: of one choice. echo_logprobs: alternatives of each echoed prompt token."""

    def given(name: str, default: float) -> Any:
        value = getattr(body, name)
        return limits.defaults.get(name, default) if value is None else value

    if (body.min_tokens or 0) > max_tokens:
        raise bad_request(f"min_tokens: {body.min_tokens}, but only {max_tokens} tokens can come", "min_tokens")
    temperature, top_p = given("temperature", 1.0), given("top_p", 1.0)
    top_k = min(max(given("top_k", 0), 0), limits.vocab_size)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,  # no mass at all leaves the likeliest token
        min_p=given("min_p", 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=given("repetition_penalty", 1.0),
        logit_bias=logit_bias(body, limits),
        allowed_token_ids=allowed_tokens(body, limits),
        bad_words=bad_words(body, limits.tokenizer),
        stop_token_ids=stop_tokens(body, limits),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=max((k for k in (body.prompt_logprobs, echo_logprobs) if k is not None), default=None),
        n=body.n or 1,
        best_of=body.best_of,
    )


def logit_bias(body: GenerationBody, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    entries = (body.logit_bias or {}).items()
    wrong = next((key for key, _ in entries if not (key.isascii() and key.isdigit() and len(key) < 12)), None)
    if wrong is not None:
        raise bad_request(f"logit_bias: {wrong[:40]!a} is not a token id", "logit_bias")
    limits.check_ids([int(key) for key, _ in entries], "logit_bias")
    return tuple((int(key), value) for key, value in entries)


def allowed_tokens(body: GenerationBody, limits: ModelLimits) -> tuple[int, ...]:
    allowed = body.allowed_token_ids or []
    limits.check_ids(allowed, "allowed_token_ids")
    return tuple(sorted(set(allowed)))


def stop_tokens(body: GenerationBody, limits: ModelLimits) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    limits.check_ids(asked, "stop_token_ids")
    own = [] if body.ignore_eos else [id for id in limits.tokenizer.end_ids if id < limits.vocab_size]
    return tuple(sorted({*own, *asked}))


def bad_words(body: GenerationBody, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the start of a text and after a space."""
    words = [spelling for word in body.bad_words or [] for spelling in (word, f" {word}")]
    return tuple(dict.fromkeys(map(tuple, tokenizer.encode(words, add_special_tokens=False)))) if words else ()
