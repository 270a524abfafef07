"""JSON objects from files, with one line that names the byte where a file stops being one.

Knows no keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from convert.errors import ConvertError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConvertError."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConvertError(f"not valid JSON ({error.msg})", path, error.pos) from error
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"not sound JSON ({error})", path) from error
    if not isinstance(value, dict):
        raise ConvertError("not a JSON object", path, 0)
    return value


def read_text(path: Path) -> str:
    """UTF-8 text. Raises ConvertError."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConvertError("missing", path) from error
    except UnicodeDecodeError as error:
        raise ConvertError("not valid UTF-8", path, error.start) from error
