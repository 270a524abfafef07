"""The first steps of a new engine: every path runs once, and the time of a decode is held against that of a prompt.

Knows the engine as its clients do; the caller throws it away afterwards.
"""

from __future__ import annotations

from server.engine.core import Engine
from server.engine.messages import SamplingParams, Submit

PROMPT_TOKENS = 64
DECODES = 3
ROUNDS = 3
STALL = 3
"""A step that also computes somebody's prompt may take so many times as long as one that decodes alone."""
LEAST_CHUNK = 16


def warm_up(engine: Engine) -> int:
    """Prompt tokens that may share a step with decodes so that no stream waits longer than STALL decode steps.

    Measured here once, before the engine serves: a schedule must not depend on a clock.
    """
    length = min(PROMPT_TOKENS, engine.info.max_num_batched_tokens, engine.info.max_model_len - DECODES)
    prompts, decodes = list[float](), list[float]()
    for number in range(ROUNDS):
        params = SamplingParams(max_tokens=DECODES, temperature=1.0, seed=number)
        engine.add(Submit("warm-up", Submit.pack([number] * max(1, length)), params))
        while engine.has_work:
            stats = engine.step().stats
            (prompts if stats.step_tokens > 1 else decodes).append(stats.step_seconds)
    return mixed_chunk(length, min(prompts, default=0.0), min(decodes)) if prompts else LEAST_CHUNK


def mixed_chunk(length: int, prompt_seconds: float, decode_seconds: float) -> int:
    """From the times of a prompt of `length` tokens and of a single decode; a multiple of LEAST_CHUNK."""
    per_token = (prompt_seconds - decode_seconds) / (length - 1)
    if per_token <= 0:
        return 1 << 30
    affordable = int((STALL - 1) * decode_seconds / per_token)
    return max(LEAST_CHUNK, affordable // LEAST_CHUNK * LEAST_CHUNK)
