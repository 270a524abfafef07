"""Length distributions, written as one word on the command line.

Knows nothing about tokens: a length is a whole number, at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Length = Callable[[Random], int]
FORMS = "N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA; each with an optional ,MAX"


def parse_length(text: str) -> Length:
    """`128`, `uniform:64,256`, `normal:512,128`, `lognormal:200,1.1,4096` (the last number, where given, is a cap)."""
    name, _, rest = text.partition(":")
    if not rest and name.strip().lstrip("-").isdigit() and int(name) < 1:
        raise ValueError(f"length {text!r}: expected a whole number from 1 up")
    try:
        numbers = [float(number) for number in (rest or name).split(",")]
        draw = _draw(name if rest else "fixed", numbers)
    except (ValueError, IndexError):
        raise ValueError(f"length {text!r}: expected {FORMS}") from None
    cap = numbers[2] if rest and len(numbers) > 2 else 1e9
    return lambda rng: max(1, round(min(cap, draw(rng))))


def _draw(name: str, numbers: list[float]) -> Callable[[Random], float]:
    first, second = numbers[0], numbers[1] if name != "fixed" else 0.0
    if first < 1 or second < 0:
        raise ValueError
    match name:
        case "fixed":
            return lambda rng: first
        case "uniform":
            return lambda rng: rng.uniform(first - 0.5, second + 0.5)
        case "normal":
            return lambda rng: rng.gauss(first, second)
        case "lognormal":
            return lambda rng: first * rng.lognormvariate(0.0, second)
    raise ValueError
