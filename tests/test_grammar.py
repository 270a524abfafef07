"""Grammars in a real engine: whatever the model would rather say, the output fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.constraints import json_part, regex_part, spec_of
from server.engine.grammar import Grammars
from server.engine.messages import Abort, GrammarSpec, Row, SamplingParams, Submit
from tests.conftest import EOS, VOCAB_SIZE
from tests.real_engine import Setup, run

llguidance = pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(max_tokens=200, temperature=1.0, seed=3, stop_token_ids=(EOS,), logprobs=0)


def spec(part: dict[str, Any]) -> GrammarSpec:
    return spec_of("test", part)


def submit(id: str, grammar: GrammarSpec | None, **fields: Any) -> Submit:
    return Submit(id, Submit.pack([*b"say it"]), replace(PARAMS, **fields), grammar=grammar)


def texts(rows: list[Row]) -> dict[tuple[str, int], tuple[str, str | None]]:
    """(text without the stop token, finish) of each choice."""
    out: dict[tuple[str, int], tuple[bytes, str | None]] = {}
    for row in rows:
        text, _ = out.get((row.id, row.choice), (b"", None))
        shown = row.tokens[:-1] if row.stop_token is not None else row.tokens
        out[row.id, row.choice] = text + bytes(shown), row.finish
    return {key: (text.decode(), finish) for key, (text, finish) in out.items()}


def test_every_choice_fits_its_schema(tiny_model: Callable[..., Path]) -> None:
    rows = run(Setup().engine(tiny_model()), submit("a", spec(json_part(PERSON)), n=4), submit("free", None))
    results = texts([row for row in rows if row.id == "a"])
    assert len({text for text, _ in results.values()}) > 1
    for text, finish in results.values():
        person = json.loads(text)
        assert finish == "stop" and set(person) == {"name", "age"} and person["age"] >= 0 and len(person["name"]) <= 8


def test_preemption_chunks_and_overlap_change_nothing(tiny_model: Callable[..., Path]) -> None:
    alone = texts(run(Setup().engine(tiny_model()), submit("a", spec(json_part(PERSON)))))
    rivals = [submit(f"r{i}", None, max_tokens=60, seed=i) for i in range(4)]
    for setup in (Setup(pages=40), Setup(budget=4, max_num_seqs=4), Setup(overlaps=True)):
        rows = run(setup.engine(tiny_model()), *rivals, submit("a", spec(json_part(PERSON))))
        assert texts([row for row in rows if row.id == "a"]) == alone
        if setup.pages == 40:
            assert any(row.usage.preemptions for row in rows if row.id == "a" and row.usage)


@pytest.mark.parametrize("choices", [["🐈", "日本"], ["é", "e"], ['say "no"', "\\d"]])
def test_characters_of_several_tokens(tiny_model: Callable[..., Path], choices: list[str]) -> None:
    rows = run(Setup().engine(tiny_model()), submit("a", spec(json_part({"enum": choices})), n=3))
    assert all(json.loads(text) in choices and finish == "stop" for text, finish in texts(rows).values())


def test_the_end_comes_only_where_the_grammar_allows_it(chain_model: Callable[..., Path]) -> None:
    """The model wants to end at once and for ever: it must say the least first."""
    model = chain_model(dict.fromkeys(range(256), EOS))
    rows = run(Setup().engine(model), submit("a", spec(regex_part("[a-c]{3,5}")), temperature=0.0))
    assert re.fullmatch("[a-c]{3}", texts(rows)["a", 0][0]) and texts(rows)["a", 0][1] == "stop"
    rows = run(Setup().engine(model), submit("a", spec(regex_part("xyz")), min_tokens=50, stop_token_ids=()))
    assert texts(rows)["a", 0] == ("xyz", "stop"), "a complete grammar ends by itself"


def test_white_space_is_bounded(tiny_model: Callable[..., Path]) -> None:
    """A model that would rather say spaces for ever."""
    bias = tuple((byte, 50.0) for byte in b" \n\t")
    grammar = spec(json_part({"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"],
                              "additionalProperties": False}))  # fmt: skip
    rows = run(Setup().engine(tiny_model()), submit("a", grammar, logit_bias=bias))
    text, finish = texts(rows)["a", 0]
    assert finish == "stop" and json.loads(text) == {"a": "x"} and len(text) < 200 and "  " in text


def test_logprobs_are_of_the_unmodified_logits(chain_model: Callable[..., Path]) -> None:
    """The model is sure of a byte that the grammar forbids."""
    model = chain_model({byte: ord("q") for byte in range(256)})
    rows = run(Setup().engine(model), submit("a", spec(regex_part("z")), temperature=0.0))
    free = run(Setup().engine(model), submit("b", None, max_tokens=1, temperature=0.0, logprobs=VOCAB_SIZE))
    whole = dict(free[0].logprobs[0].top)
    assert rows[0].tokens == (ord("z"),) and rows[0].logprobs[0].logprob == pytest.approx(whole[ord("z")])
    assert whole[ord("z")] < max(whole.values())


def test_a_limit_of_tokens_still_holds(tiny_model: Callable[..., Path]) -> None:
    rows = run(Setup().engine(tiny_model()), submit("a", spec(json_part(PERSON)), max_tokens=5))
    assert texts(rows)["a", 0][1] == "length"


def test_a_request_that_allows_nothing_fails_alone(tiny_model: Callable[..., Path]) -> None:
    impossible = submit("a", spec(regex_part("a+")), allowed_token_ids=(ord("b"),))
    rows = run(Setup().engine(tiny_model()), impossible, submit("b", spec(regex_part("c{4}"))))
    errors = [row.error for row in rows if row.id == "a"]
    assert len(errors) == 1 and "rules out every token" in str(errors[0])
    assert texts([row for row in rows if row.id == "b"])["b", 0] == ("cccc", "stop")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (regex_part("(a"), "regex"),
        (json_part({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
        (json_part({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
)
def test_a_bad_grammar_is_told(tiny_model: Callable[..., Path], part: dict[str, Any], message: str) -> None:
    (row,) = run(Setup().engine(tiny_model()), submit("a", spec(part)))
    assert row.finish == "error" and message in str(row.error).lower().replace("uniqueitems", "uniqueItems")


def test_compiled_grammars_are_shared_and_bounded(tiny_model: Callable[..., Path]) -> None:
    grammars = Grammars(tiny_model(), VOCAB_SIZE)
    first = grammars.matcher(spec(regex_part("ab")))
    first.accept(ord("a"))
    assert first.mask().nonzero()[0].tolist() == [ord("b")]
    assert grammars.matcher(spec(regex_part("ab"))).mask().nonzero()[0].tolist() == [ord("a")], "copies stand alone"
    for index in range(100):
        grammars.matcher(spec(regex_part(f"x{index}")))
    assert grammars.num_compiled <= 16


# ---- single choices


def test_one_choice_ends_and_its_siblings_go_on(tiny_model: Callable[..., Path]) -> None:
    wanted = run(Setup().engine(tiny_model()), submit("a", None, n=3, max_tokens=30, stop_token_ids=()))
    engine = Setup().engine(tiny_model())
    engine.add(submit("a", None, n=3, max_tokens=30, stop_token_ids=()))
    rows: list[Row] = []
    while not any(row.choice == 0 for row in rows):
        rows += engine.step().rows
    for _ in range(2):
        engine.abort(Abort((), "stop_string", (("a", 0), ("a", 7), ("gone", 0))))
        engine.check_integrity()
    while engine.has_work:
        rows += engine.step().rows
        engine.check_integrity()
    ends = {row.choice: row.finish for row in rows if row.finish}
    assert ends == {0: "abort", 1: "length", 2: "length"}
    said = {choice: [t for row in rows if row.choice == choice for t in row.tokens] for choice in range(3)}
    full = {choice: [t for row in wanted if row.choice == choice for t in row.tokens] for choice in range(3)}
    assert said[1] == full[1] and said[2] == full[2] and len(said[0]) < 30 and said[0] == full[0][: len(said[0])]
