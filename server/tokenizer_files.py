"""The side files of a checkpoint's tokenizer: which tokens end a text, and how JSON files are read.

Knows no tokenizer library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.json_values import token_ids


def end_ids(folder: Path) -> frozenset[int]:
    """What generation_config.json says, else config.json, else the eos_token of tokenizer_config.json.

    Raises ValueError for a file that is broken or says something else than ids.
    """
    for name in ("generation_config.json", "config.json"):
        if ids := token_ids(read_json(folder / name), "eos_token_id"):
            return frozenset(ids)
    eos = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    added = read_json(folder / "tokenizer.json").get("added_tokens", [])
    return frozenset(item["id"] for item in added if item["content"] == eos)


def token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def read_json(path: Path) -> dict[str, Any]:
    """An absent file is an empty object: every side file of a checkpoint is optional."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
