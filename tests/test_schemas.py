"""Request bodies: what is accepted, what is refused, and that nothing a client sends breaks the check."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.schemas import NOT_SUPPORTED, ChatBody, CompletionBody, unknown_fields

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "hi"} | fields)


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": HI} | fields)


@pytest.mark.parametrize("prompt", ["", "text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [None, 1, [], [[]], [1, "a"], ["a", 1], [1.5], [-1], [True], {}, [["a"]], ["a"] * 129]
)
def test_no_prompts(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 1e308, "1", True, float("nan"), float("inf"), [], {}]),
        ("top_p", [-1, 2.0, "0.5"]),
        ("top_k", [-5, -7, 1.5, "1", True]),
        ("min_p", [-1, 1.1]),
        ("presence_penalty", [5, -2.1]),
        ("frequency_penalty", [2.1, "1"]),
        ("repetition_penalty", [0, -1, 1e-320, float("inf")]),
        ("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "7", True]),
        ("n", [0, -1, 129, 5_000_000, 1.0]),
        ("max_tokens", [-1, "ten", 1.5, True]),
        ("logprobs", [-1, 21, True, "1"]),
        ("stop", [5, [5], ["x"] * 17, {}, "x" * 1025]),
        ("stop_token_ids", [[-1], ["1"], 5]),
        ("logit_bias", [{"1": 101}, {"1": "x"}, [], "x"]),
        ("stream", ["true", 1]),
        ("stream_options", [{"include_usage": True}, 1]),
        ("bad_words", [[""], "x"]),
        ("timeout", [0, -1, float("inf")]),
    ],
)
def test_values_out_of_bounds(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValidationError) as error:
            completion(**{field: value})
        assert field in str(error.value)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_any_seed_of_64_bits(seed: int) -> None:
    assert completion(seed=seed).seed == seed


def test_null_means_not_given() -> None:
    names = set(ChatBody.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)).model_dump() == chat().model_dump()


@pytest.mark.parametrize(
    ("stop", "stops"), [(None, ()), ([], ()), ("", ()), ([""], ()), (["a", "", "b"], ("a", "b")), ("x", ("x",))]
)
def test_empty_stops_ask_for_nothing(stop: Any, stops: tuple[str, ...]) -> None:
    assert completion(stop=stop).stops == stops


def test_fields_that_need_each_other() -> None:
    for fields in ({"top_logprobs": 1}, {"continue_final_message": True, "add_generation_prompt": True}):
        with pytest.raises(ValidationError):
            chat(**fields)
    with pytest.raises(ValidationError, match="min_tokens 5 is more than max_tokens 4"):
        completion(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("role", ["robot", "", None, 1, "function"])
def test_roles_come_from_a_list(role: Any) -> None:
    with pytest.raises(ValidationError):
        chat(messages=[{"role": role, "content": "x"}])


def test_messages_as_a_template_wants_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "n"}])
    assert [message.as_dict() for message in body.messages] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "n"},
    ]


def test_content_that_is_no_text_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValidationError, match="text"):
        chat(messages=[{"role": "user", "content": [image]}])


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_known_fields_that_would_have_no_effect_are_refused(name: str) -> None:
    assert unknown_fields(completion(**{name: None})) == []
    for harmless in NOT_SUPPORTED[name]:
        assert unknown_fields(completion(**{name: harmless})) == []
    with pytest.raises(ValueError, match=name):
        unknown_fields(completion(**{name: {"something": "real"}}))


def test_unknown_fields_are_listed_and_labels_are_not() -> None:
    assert unknown_fields(completion(user="me", metadata={}, frobnicate=1, best_of=1)) == ["frobnicate"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, *NOT_SUPPORTED, "new"]), JSON)
def test_whatever_comes_is_accepted_or_refused(name: str, value: Any) -> None:
    for model in (ChatBody, CompletionBody):
        with contextlib.suppress(ValueError):  # ValidationError is one
            unknown_fields(model.model_validate({"prompt": "hi", "messages": HI} | {name: value}))
