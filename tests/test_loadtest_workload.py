"""Arrivals, lengths, prompts and traces."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest

from server.loadtest.api import Api, calibrated
from server.loadtest.arrivals import Arrivals, parse_shape
from server.loadtest.http import HttpClient
from server.loadtest.lengths import parse_length
from server.loadtest.options import parse_rates, parse_shared
from server.loadtest.workload import (
    Conversation,
    Filler,
    Shape,
    SharedPrefix,
    from_texts,
    read_texts,
    read_trace,
    repeated,
    synthetic,
    trace_line,
)

SHAPE = Shape(parse_length("40"), parse_length("8"))


def prompts(conversations: list[Conversation]) -> list[str]:
    return [str(made.turns[0].prompt) for made in conversations]


@pytest.mark.parametrize(("shape", "variation"), [(inf, 0.0), (1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(shape: float, variation: float) -> None:
    offsets = np.array(Arrivals(5.0, 5.0, shape).offsets(4000.0, Random(1)))
    gaps = np.diff(offsets)
    assert (len(offsets), offsets[-1]) == (20_000, pytest.approx(4000.0))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.05)


@pytest.mark.parametrize(("start", "stop"), [(0.0, 20.0), (20.0, 2.0)])
def test_a_ramp_moves_the_rate_linearly(start: float, stop: float) -> None:
    offsets = np.array(Arrivals(start, stop).offsets(1000.0, Random(2)))
    assert len(offsets) == round((start + stop) / 2 * 1000)
    for middle in (100, 500, 900):
        seen = ((offsets > middle - 50) & (offsets <= middle + 50)).sum() / 100
        assert seen == pytest.approx(start + (stop - start) * middle / 1000, rel=0.15)


def test_a_limit_takes_the_first_arrivals() -> None:
    assert len(Arrivals(10.0, 10.0).offsets(100.0, Random(0), limit=7)) == 7


def test_words_of_the_command_line() -> None:
    assert [parse_shape(text) for text in ("poisson", "constant", "gamma:0.5")] == [1.0, inf, 0.5]
    assert parse_rates("2,1:20") == [(2.0, 2.0), (1.0, 20.0)]
    assert parse_shared("groups=4,len=512,zipf=1") == SharedPrefix(4, 512, 1.0)
    for parse, bad in (
        (parse_shape, "gamma:0"),
        (parse_rates, "0"),
        (parse_rates, "a:b"),
        (parse_shared, "groups=0,len=4"),
    ):
        with pytest.raises(ValueError, match="expected"):
            parse(bad)


def test_lengths_follow_their_distribution() -> None:
    def mean(text: str) -> float:
        draw, rng = parse_length(text), Random(3)
        return float(np.mean([draw(rng) for _ in range(20_000)]))

    assert mean("128") == 128
    assert mean("uniform:10,20") == pytest.approx(15, rel=0.01)
    assert mean("normal:500,50") == pytest.approx(500, rel=0.01)
    assert mean("lognormal:100,0.5") == pytest.approx(100 * np.exp(0.125), rel=0.02)
    assert max(parse_length("lognormal:100,2,300")(Random(n)) for n in range(500)) == 300
    for bad in ("0", "", "uniform:5", "wat:1,2", "normal:a,b"):
        with pytest.raises(ValueError, match="expected"):
            parse_length(bad)


def test_a_seed_repeats_and_a_nonce_does_not_share() -> None:
    once, again = (prompts(list(islice(synthetic(SHAPE, Filler("words"), "7:a"), 50))) for _ in range(2))
    other = prompts(list(islice(synthetic(SHAPE, Filler("words"), "7:b"), 50)))
    assert once == again
    heads = {" ".join(prompt.split()[:8]) for prompt in once + other}
    assert len(heads) == 100


def test_prompts_have_the_length_that_the_server_counts() -> None:
    filler = Filler("words", per_word=1.25, overhead=5)
    text = filler.fill(Random(0), 130)
    assert isinstance(text, str)
    assert len(text.split()) == 100
    assert len(Filler("ids", low=10, high=12).fill(Random(0), 64)) == 64


def test_groups_share_a_prefix_and_nothing_else() -> None:
    shape = Shape(parse_length("10"), parse_length("4"), SharedPrefix(3, 30))
    made = prompts(list(islice(synthetic(shape, Filler("words"), "s"), 60)))
    assert len({" ".join(prompt.split()[:30]) for prompt in made}) == 3
    assert len({" ".join(prompt.split()[30:]) for prompt in made}) == 60


def test_zipf_prefers_the_first_groups() -> None:
    picks = [SharedPrefix(5, 1, 1.5).pick(Random(n)) for n in range(4000)]
    counts = np.bincount(picks, minlength=5)
    assert (np.diff(counts) < 0).all()


def test_a_warm_pool_comes_round() -> None:
    made = prompts(list(islice(repeated(lambda: synthetic(SHAPE, Filler("words"), "s"), 4), 12)))
    assert made[:4] == made[4:8] == made[8:]
    assert len(set(made)) == 4


def test_a_mark_makes_given_texts_new(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n"two"\n\n{"text": "three"}\n')
    texts = read_texts(path, 10)
    assert texts == ["one", "two", "three"]
    plain = prompts(list(islice(from_texts(texts, parse_length("4"), "s", mark=False), 4)))
    marked = prompts(list(islice(from_texts(texts, parse_length("4"), "s", mark=True), 4)))
    assert plain == ["one", "two", "three", "one"]
    assert len({prompt.split()[0] for prompt in marked}) == 4


def test_a_text_is_cut_into_pieces(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a b c d e")
    assert read_texts(path, 2) == ["a b", "c d", "e"]


def test_the_own_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    made = list(islice(synthetic(SHAPE, Filler("words"), "s"), 5))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(trace_line(conversation, index * 0.5) for index, conversation in enumerate(made)))
    read = list(read_trace(path, Filler("words"), "other", speedup=2.0))
    assert prompts(read) == prompts(made)
    assert [conversation.at for conversation in read] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_mooncake_blocks_with_one_hash_are_one_text(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [8, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = list(read_trace(path, Filler("ids"), "s", speedup=1.0))
    first, second, third = ([*made.turns[0].prompt] for made in read)
    assert [made.at for made in read] == [0.0, 1.5, 3.0]
    assert [len(first), len(second), len(third)] == [1000, 1030, 600]
    assert first[:512] == second[:512] != third[:512]
    assert first[512:] == second[512:1000]


@pytest.mark.parametrize("line", ["{", '{"at": 1}', "[]", '{"at": "x", "input_length": 4, "output_length": 4}'])
def test_a_bad_trace_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"trace\.jsonl:1"):
        list(read_trace(path, Filler("words"), "s", 1.0))


class Characters(HttpClient):
    """A server of the smallest vocabulary: a token for every character, and three around them."""

    async def fetch(self, method: str, target: str, body: bytes = b"", seconds: float = 60.0) -> tuple[int, bytes]:
        return 200, json.dumps({"usage": {"prompt_tokens": 3 + len(json.loads(body)["prompt"])}}).encode()


@pytest.mark.parametrize("tokens", [32, 128, 400])
def test_prompts_are_as_long_as_asked_where_words_cost_unlike_numbers_of_tokens(tokens: int) -> None:
    client = Characters("http://127.0.0.1:1", lambda: 0.0)
    filler = asyncio.run(calibrated(client, Api("completions", "m", False)))
    lengths = [3 + len(filler.fill(Random(seed), tokens)) for seed in range(200)]
    assert sum(lengths) / len(lengths) == pytest.approx(tokens, rel=0.1)
