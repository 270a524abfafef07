"""Values of a JSON object read by key: their type and range checked, the refusal naming key, value and limit.

Knows no particular key; imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Json = Mapping[str, Any]
T = TypeVar("T")

MOST = 1 << 24
"""Of any size of a model, unless its reader says less: ten times what has been built, and small enough to multiply."""


class ConfigError(ValueError):
    """A config.json that cannot be served: the message names the key, its value and what is accepted."""


def require(raw: Json, key: str, kind: type[T]) -> T:
    """raw[key], which must be there and not null. Raises ConfigError."""
    if raw.get(key) is None:
        raise ConfigError(f"config.json lacks {key}")
    return typed(raw[key], key, kind)


def optional(raw: Json, key: str, kind: type[T], default: T) -> T:
    """raw[key], or the default where it is missing or null. Raises ConfigError."""
    return default if raw.get(key) is None else typed(raw[key], key, kind)


def typed(value: Any, key: str, kind: type[T]) -> T:
    """value itself if it is a kind (a whole number is a float too, a truth value is no number)."""
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{key} is {value!r}, expected {kind.__name__}")
    return value  # type: ignore[return-value]


def positive(raw: Json, key: str, default: int | None = None, most: int = MOST) -> int:
    """A whole number from 1 to most. Raises ConfigError."""
    value = require(raw, key, int) if default is None else optional(raw, key, int, default)
    if not 1 <= value <= most:
        limit = "expected at least 1" if value < 1 else f"expected at most {most}"
        raise ConfigError(f"{key} is {value}, {limit}")
    return value


def number(raw: Json, key: str, default: float | None = None) -> float:
    """A positive number of ordinary size. Raises ConfigError."""
    value = require(raw, key, float) if default is None else optional(raw, key, float, default)
    return positive_float(value, key)


def numbers(raw: Json, key: str) -> tuple[float, ...]:
    """A list of positive numbers of ordinary size. Raises ConfigError."""
    return tuple(positive_float(typed(value, key, float), key) for value in require(raw, key, list))


def positive_float(value: float, key: str) -> float:
    """value as a float. Raises ConfigError for zero, negative, NaN, and what fp32 could not bear."""
    if not 1e-30 < value < 1e30:  # an integer may be larger than any float
        limit = " between 1e-30 and 1e30" if value > 0 else ""
        raise ConfigError(f"{key} is {value}, expected a positive number{limit}")
    return float(value)


def agreed(raw: Json, keys: tuple[str, ...], default: str) -> str:
    """The text under whichever of the keys is set; where several are, they must say the same. Raises ConfigError."""
    values = [typed(raw[key], key, str) for key in keys if raw.get(key) is not None]
    if len(set(values)) > 1:
        raise ConfigError(f"{' and '.join(keys)} disagree: {' and '.join(values)}")
    return values[0] if values else default


def token_ids(raw: Json, key: str) -> tuple[int, ...]:
    """One token id or a list of them; () where the key is missing. Raises ConfigError."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(typed(token, key, int) for token in ids)
