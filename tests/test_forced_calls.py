"""The grammar of forced calls: in every format, whatever follows it is read back as calls of the offered functions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from server.constraints import lark_part, spec_of, with_spacing
from server.engine.grammar import Grammars
from server.tool_calls import ToolParser, add_calls
from server.tool_formats import FORMATS, MAX_FORCED_CALLS, forced_calls
from tests.conftest import EOS, VOCAB_SIZE

pytest.importorskip("llguidance")

ENUM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"name": "add", "parameters": with_spacing(ENUM)}, {"name": "now", "parameters": with_spacing(ENUM)}]


def say(grammars: Grammars, lark: str, rng: random.Random) -> str:
    """A random text of the grammar; it ends wherever it may, sooner or later."""
    matcher = grammars.matcher(spec_of("tools", lark_part(lark)))
    said = bytearray()
    while not matcher.is_complete and len(said) < 20_000:
        allowed = matcher.mask().nonzero()[0].tolist()
        if EOS in allowed and rng.random() < 0.3:
            break
        token = rng.choice([token for token in allowed if token != EOS])
        matcher.accept(token)
        said.append(token)
    return said.decode()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_forced_is_read_back(tiny_model: Callable[..., Path], name: str, parallel: bool) -> None:
    format, rng = FORMATS[name], random.Random(7)
    grammars = Grammars(tiny_model(), VOCAB_SIZE)
    for _ in range(10):
        text = say(grammars, forced_calls(format, TOOLS, parallel, {}), rng)
        parser = ToolParser(format, frozenset(["add", "now"]))
        parsed, rest = parser.feed(text), parser.finish()
        add_calls(parsed.calls, rest.calls)
        assert parsed.content + rest.content == "", text
        assert 1 <= len(parsed.calls) == parser.completed <= (MAX_FORCED_CALLS if parallel else 1)
        assert all(call.name in ("add", "now") and json.loads(call.arguments)["a"] in (1, 2) for call in parsed.calls)


def test_markers_that_are_control_tokens_are_named_by_id() -> None:
    lark = forced_calls(FORMATS["mistral"], TOOLS, False, {"[TOOL_CALLS]": 5})
    assert lark.startswith('start: <[5]> "[" call "]"')
