"""What each sampling parameter means for the logits of its row, and that rows do not meet."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from model.batch import Sampled
from model.ops.reference import ReferenceOps
from server.engine.messages import SamplingParams, Submit, TokenLogprob
from server.engine.request import Request, Sequence
from server.engine.sampler import ScoredPrompt, prompt_batch, prompt_logprobs, sample_batch, sampled_tokens
from server.engine.stream import HostStream

V = 12
CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.9, 1.0, -1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 2.8, -5.0])


def sequence(prompt: list[int] = [3], output: list[int] = [], choice: int = 0, **fields: Any) -> Sequence:  # noqa: B006
    params = SamplingParams(max_tokens=100, n=choice + 1, **{"temperature": 0.0, **fields})
    found = Request.from_submit(Submit("id", Submit.pack(prompt), params), 0).sequences[choice]
    for token in output:
        found.num_in_flight += 1
        found.append(token)
    return found


def sample(*sequences: Sequence, logits: torch.Tensor = LOGITS) -> list[int]:
    return [token.token for token in run(*sequences, logits=logits)]


def run(*sequences: Sequence, logits: torch.Tensor = LOGITS):  # type: ignore[no-untyped-def]
    rows = [(one, one.num_output) for one in sequences]
    return sampled_tokens(rows, ReferenceOps().sample(logits.repeat(len(rows), 1), sample_batch(rows, V, HostStream())))


def test_greedy_takes_the_best() -> None:
    assert sample(sequence(), sequence(prompt=[1, 2])) == [1, 1]


def test_a_row_without_wishes_has_no_sparse_parts() -> None:
    batch = sample_batch([(sequence(), 0)], V, HostStream())
    assert (batch.bias, batch.allowed, batch.repetition, batch.frequency, batch.num_logprobs) == (None,) * 4 + (-1,)


@pytest.mark.parametrize(
    ("fields", "output", "token"),
    [
        ({"logit_bias": ((4, 10.0),)}, [], 4),
        ({"logit_bias": ((1, -100.0),)}, [], 2),
        ({"allowed_token_ids": (4, 11)}, [], 4),
        ({"allowed_token_ids": (11,), "logit_bias": ((11, -3.0),)}, [], 11),
        ({"bad_words": ((1,),)}, [], 2),
        ({"bad_words": ((1,), (2,))}, [], 10),
        ({"bad_words": ((7, 1),)}, [], 1),
        ({"bad_words": ((7, 1),)}, [7], 2),
        ({"bad_words": ((5, 7, 1),)}, [7], 1),
        ({"bad_words": ((5, 7, 1),)}, [5, 7], 2),
        ({"bad_words": ((1,),), "logit_bias": ((1, 50.0),)}, [], 2),
        ({"stop_token_ids": (1,), "min_tokens": 2}, [5], 2),
        ({"stop_token_ids": (1,), "min_tokens": 2}, [5, 5], 1),
        ({"stop_token_ids": (1,), "min_tokens": 2, "logit_bias": ((1, 9.0),)}, [5], 2),
        ({"presence_penalty": 0.15}, [1], 2),
        ({"presence_penalty": 0.05}, [1, 1, 1], 1),
        ({"frequency_penalty": 0.06}, [1], 1),
        ({"frequency_penalty": 0.06}, [1, 1], 2),
        ({"presence_penalty": -1.0}, [2], 2),
        ({"repetition_penalty": 1.2}, [1], 2),
        ({"repetition_penalty": 0.5}, [10], 10),
    ],
)
def test_parameters_move_the_choice(fields: dict[str, Any], output: list[int], token: int) -> None:
    assert sample(sequence(output=output, **fields)) == [token]


def test_presence_and_frequency_look_at_the_output_alone_repetition_also_at_the_prompt() -> None:
    assert sample(sequence(prompt=[1, 1, 1], presence_penalty=2.0, frequency_penalty=2.0)) == [1]
    assert sample(sequence(prompt=[1], repetition_penalty=1.2)) == [2]


def test_repetition_multiplies_what_is_negative() -> None:
    logits = torch.tensor([-1.0] + [-1.1] * (V - 1))
    assert sample(sequence(prompt=[0], repetition_penalty=1.2), logits=logits) == [1]


def test_rows_do_not_meet() -> None:
    """Every kind of row, alone and beside all the others."""
    rows = [
        sequence(),
        sequence(logit_bias=((4, 10.0),)),
        sequence(allowed_token_ids=(4, 11), output=[4]),
        sequence(bad_words=((1,),), output=[2, 3]),
        sequence(presence_penalty=1.0, frequency_penalty=0.5, output=[1, 2, 2]),
        sequence(prompt=[1, 2], repetition_penalty=1.3),
        sequence(temperature=1.0, seed=5),
        sequence(temperature=1.5, seed=5, top_k=3, choice=1),
        sequence(temperature=0.7, seed=6, top_p=0.8, output=[1]),
        sequence(temperature=2.0, seed=7, min_p=0.1, logprobs=2),
        sequence(stop_token_ids=(1,), min_tokens=3, logprobs=0),
    ]
    alone = [run(row)[0] for row in rows]
    assert run(*rows) == alone
    assert run(*reversed(rows)) == alone[::-1]


def test_the_random_number_is_of_seed_choice_and_index_alone() -> None:
    def draws(**fields: Any) -> list[int]:
        return [sample(sequence(temperature=3.0, output=[0] * index, **fields))[0] for index in range(20)]

    assert draws(seed=1) == draws(seed=1)
    assert len({tuple(draws(seed=1)), tuple(draws(seed=2)), tuple(draws(seed=1, choice=1))}) == 3


def test_top_k_keeps_the_best() -> None:
    rows = [sequence(temperature=5.0, seed=seed, top_k=3) for seed in range(200)]
    assert set(sample(*rows)) == {1, 2, 10}


def test_draws_follow_the_distribution() -> None:
    """2,000 draws against softmax: chi-square below the 99.99 % point of 11 degrees of freedom (37.4)."""
    counts = Counter(sample(*[sequence(temperature=1.0, seed=seed) for seed in range(2000)]))
    wanted = (LOGITS.softmax(0) * 2000).tolist()
    assert sum((counts[token] - expected) ** 2 / expected for token, expected in enumerate(wanted)) < 37.4


def test_logprobs_are_of_the_unmodified_logits_and_each_row_gets_what_it_asked_for() -> None:
    none, chosen, best = run(sequence(), sequence(logprobs=0, logit_bias=((4, 50.0),)), sequence(logprobs=3))
    table = LOGITS.log_softmax(0).tolist()
    assert none.logprob is None
    assert chosen.logprob == TokenLogprob(4, table[4])
    assert best.logprob == TokenLogprob(1, table[1], ((1, table[1]), (2, table[2]), (10, table[10])))


def test_what_is_not_finite_is_marked() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    rows = [(sequence(), 0)] * 3
    tokens = sampled_tokens(rows, ReferenceOps().sample(logits, sample_batch(rows, V, HostStream())))
    assert [token.finite for token in tokens] == [True, False, False]
    assert tokens[0].token == 1


def test_prompt_logprobs_name_the_token_that_follows_and_the_best() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    table = logits.log_softmax(-1)
    best: Sampled = ReferenceOps().sample(logits.clone(), prompt_batch(2, 1, CPU))
    chosen = torch.stack([table[0, 7], table[1, 0]])
    assert prompt_logprobs(ScoredPrompt([7, 0], chosen, best.top_ids, best.top_logprobs)) == [
        TokenLogprob(7, table[0, 7].item(), ((1, table[0, 1].item()),)),
        TokenLogprob(0, table[1, 0].item(), ((10, table[1, 10].item()),)),
    ]
    assert prompt_logprobs(ScoredPrompt([7, 0], chosen, None, None)) == [
        TokenLogprob(7, table[0, 7].item()),
        TokenLogprob(0, table[1, 0].item()),
    ]
