"""Everything that can be wrong with a request: refused in one shape that names what is at fault, and nobody is hurt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.schemas import ChatBody, CompletionBody
from tests.openai_calls import HI, complete, refused


def test_framework_errors_have_the_same_shape(http: httpx.Client) -> None:
    for response, status in (
        (http.get("/v1/nope"), 404),
        (http.get("/v1/completions"), 405),
        (http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}), 400),
        (http.post("/v1/completions", content=b"hello"), 400),
        (http.post("/v1/completions", json=[1]), 400),
        (http.post("/v1/completions", json="x"), 400),
        (http.post("/v1/completions", json={}), 400),
        (http.get("/v1/models/nope"), 404),
    ):
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "user": "\xff"}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a"} {"prompt": "b"}',
    ],
)
def test_bodies_that_are_no_good_json(http: httpx.Client, raw: bytes) -> None:
    response = http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
    complete(http)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 2.0),
        ("top_k", -7),
        ("presence_penalty", 5),
        ("seed", 2**63),
        ("n", 5_000_000),
        ("logit_bias", {"259": 5}),
        ("logit_bias", {"x": 5}),
        ("logit_bias", {"²": 5}),
        ("stop_token_ids", [264]),
        ("allowed_token_ids", [259]),
        ("min_tokens", 17),
        ("max_tokens", "ten"),
        ("best_of", 10**6),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("stream_options", {"include_usage": True}),
        ("best_of", 1),
    ],
)
def test_the_field_at_fault_is_named(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http, **{"n": 2, field: value})
    assert field in error["message"] and error["param"] in (field, None)
    complete(http)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields]), JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_any_field_is_our_fault(http: httpx.Client, name: str, value: Any) -> None:
    if name in ("timeout", "queue_timeout"):
        return  # a huge one is fine and a tiny one is a 503 by design
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = json.dumps({"prompt": "a", "messages": HI, "max_tokens": 2} | {name: value})
        response = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), f"{response.status_code} {response.text} for {body}"


def test_encoded_bodies_are_refused_by_name(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415 and "gzip" in response.json()["error"]["message"]
