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


def spec_of(kind: str, *alternatives: Part, after: str | None = None) -> GrammarSpec:
    """One grammar out of several that may all do. after: any text comes first, up to this marker (a Lark item)."""
    if after is None and len(alternatives) == 1:
        return GrammarSpec(kind, json.dumps({"grammars": list(alternatives)}))
    parts = [part | {"name": f"part_{index}"} for index, part in enumerate(alternatives)]
    body = " | ".join(f"@{part['name']}" for part in parts)
    lark = f"start: body\nbody: {body}" if after is None else f"start: {after}\nbody: {body}"
    return GrammarSpec(kind, json.dumps({"grammars": [{"lark_grammar": lark}, *parts]}))
