"""The first steps of a new engine: every path runs once, so that no kernel is compiled for a client's request; and on a
CPU the time of a decode is held against that of a prompt.

Knows the engine as its clients do and nothing of its inside; the caller throws it away afterwards.
"""

from __future__ import annotations

import time
from statistics import median

from server.engine.core import Engine
from server.engine.messages import SamplingParams, Submit

PROMPT_TOKENS = 64
DECODES = 3
ROUNDS = 7
ENOUGH_ROUNDS = 3
ENOUGH_SECONDS = 0.5
"""Large models take no more than ENOUGH_ROUNDS once this much time has gone."""
STALL = 3
"""A step that also computes somebody's prompt may take so many times as long as one that decodes alone."""
LEAST_CHUNK = 32
"""Whatever was measured: prompts must not crawl because something else ran on the machine during the start."""
STEP_OF_CHUNK = 16


def warm_up(engine: Engine) -> int:
    """Prompt tokens that may share a step with decodes so that no stream waits longer than STALL decode steps.

    Measured here once, before the engine serves: a schedule must not depend on a clock. Prompts and decodes take turns
    and medians are compared, so that a machine that is busy at the start slows both alike.
    """
    length = min(PROMPT_TOKENS, engine.info.max_num_batched_tokens, engine.info.max_model_len - DECODES)
    prompts, decodes, begun = list[float](), list[float](), time.monotonic()
    for number in range(ROUNDS):
        if number >= ENOUGH_ROUNDS and time.monotonic() - begun > ENOUGH_SECONDS:
            break
        params = SamplingParams(max_tokens=DECODES, temperature=1.0, seed=number)
        engine.add(Submit("warm-up", Submit.pack([number] * max(1, length)), params))
        while engine.has_work:
            stats = engine.step().stats
            (prompts if stats.step_tokens > 1 else decodes).append(stats.step_seconds)
    return mixed_chunk(length, median(prompts), median(decodes)) if prompts else LEAST_CHUNK


def mixed_chunk(length: int, prompt_seconds: float, decode_seconds: float) -> int:
    """From the times of a prompt of `length` tokens and of a single decode; a multiple of STEP_OF_CHUNK."""
    per_token = (prompt_seconds - decode_seconds) / (length - 1)
    if per_token <= 0:
        return 1 << 30
    affordable = int((STALL - 1) * decode_seconds / per_token)
    return max(LEAST_CHUNK, affordable // STEP_OF_CHUNK * STEP_OF_CHUNK)


PROMPT_LENGTHS = (1, 15, 16, 17, 64)
"""A compiler tells apart lengths of one, multiples of sixteen, and others."""
EVERY_SAMPLING = (
    SamplingParams(DECODES, temperature=0),
    SamplingParams(DECODES, temperature=1, seed=1),
    SamplingParams(DECODES, temperature=1, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(DECODES, temperature=1, logprobs=0, n=2),
    SamplingParams(DECODES, temperature=0, logprobs=5, prompt_logprobs=5),
    SamplingParams(DECODES, temperature=1, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(DECODES, temperature=0, logit_bias=((0, 1.0),), allowed_token_ids=(0, 1), bad_words=((1,),)),
)


def try_every_path(engine: Engine) -> None:
    """Prompts of every kind of length, the widest step and every kind of sampling; then all of these together."""
    longest = max(1, engine.info.max_model_len - DECODES)
    lengths = sorted({min(length, longest) for length in (*PROMPT_LENGTHS, engine.info.max_num_batched_tokens)})
    tried = [(length, EVERY_SAMPLING[0]) for length in lengths]
    tried += [(min(longest, PROMPT_TOKENS), params) for params in EVERY_SAMPLING]
    for number, (length, params) in enumerate(tried):
        _run(engine, [_submit(number, length, params)])
    _run(engine, [_submit(len(tried) + i, min(longest, 3 + i), params) for i, params in enumerate(EVERY_SAMPLING)])


def _submit(number: int, length: int, params: SamplingParams) -> Submit:
    """No two numbers begin alike, or the prefix cache would answer."""
    return Submit(f"warm-up {number}", Submit.pack([number] * length), params)


def _run(engine: Engine, submits: list[Submit]) -> None:
    """One arrives a step, so that prompts share steps with decodes."""
    for submit in submits:
        engine.add(submit)
        engine.step()
    while engine.has_work:
        engine.step()
