"""What a request demands of the shape of its output, as a grammar for the engine.

Writes llguidance's JSON (a list of named parts) without needing the library; knows no tokens and no models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from server.engine.messages import GrammarSpec

WHITE_SPACE = r" |\n[ \t]{0,20}"
"""Between the parts of a JSON text: a space, or a new line with its indent. Unbounded, a model may go on for ever."""
NO_WHITE_SPACE = {"whitespace_flexible": False}

Part = dict[str, Any]


def json_part(schema: dict[str, Any], *, white_space: bool = True) -> Part:
    return {"json_schema": with_spacing(schema, white_space)}


def with_spacing(schema: dict[str, Any], white_space: bool = True) -> dict[str, Any]:
    return schema | {"x-guidance": {"whitespace_pattern": WHITE_SPACE} if white_space else NO_WHITE_SPACE}


def regex_part(pattern: str) -> Part:
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    one_line = escaped.replace("\n", r"\n")
    return {"lark_grammar": f"start: /{one_line}/"}


def choice_part(choices: Sequence[str]) -> Part:
    return {"lark_grammar": "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)}


def lark_part(text: str) -> Part:
    return {"lark_grammar": text}


def grammar_part(text: str) -> Part:
    """GBNF or Lark as the user wrote it: which of the two is found out where it is checked."""
    return {"ebnf": text}


def spec_of(kind: str, *alternatives: Part, thought_end: str | None = None) -> GrammarSpec:
    """One grammar out of several that may all do.

    thought_end: the prompt has begun a thought, so any text comes first, up to this marker: its text as a JSON string,
    or <[id]> where it is a control token.
    """
    if thought_end is None and len(alternatives) == 1:
        return GrammarSpec(kind, json.dumps({"grammars": list(alternatives)}))
    parts = [part | {"name": f"part_{index}"} for index, part in enumerate(alternatives)]
    body = "body: " + " | ".join(f"@{part['name']}" for part in parts)
    lark = "\n".join([*thought_rules(thought_end), body])
    return GrammarSpec(kind, json.dumps({"grammars": [{"lark_grammar": lark}, *parts]}))


def thought_rules(end: str | None) -> list[str]:
    if end is None:
        return ["start: body"]
    if end.startswith("<["):
        return [f"start: THOUGHT {end} body", r"THOUGHT: /(.|\n)*/"]
    return ["start: thought body", rf"thought[suffix={end}]: /(.|\n)*/"]
