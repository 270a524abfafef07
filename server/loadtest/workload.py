"""What is sent: conversations of one or more turns, endless unless a file ends them.

Knows nothing about when they are sent or how. Item i depends on (seed, nonce, i) alone: a run can be repeated exactly,
and another nonce shares no prefix with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from random import Random
from typing import Any

from server.loadtest.lengths import Length
from server.loadtest.words import WORDS

Prompt = str | list[int]
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: Prompt
    max_tokens: int
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one user, `think` seconds before each but the first; `at` is the start a trace gives, in seconds."""

    turns: tuple[Turn, ...]
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Filler:
    """Makes prompts of about a given number of tokens.

    Words: (tokens - overhead) / per_word of them, as measured on the server. Ids: exactly that many from [low, high).
    """

    kind: str
    per_word: float = 1.0
    overhead: float = 0.0
    low: int = 1000
    high: int = 30000

    def fill(self, rng: Random, tokens: int) -> Prompt:
        if self.kind == "ids":
            return [rng.randrange(self.low, self.high) for _ in range(tokens)]
        return " ".join(rng.choices(WORDS, k=max(1, round((tokens - self.overhead) / self.per_word))))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`groups` prefixes of `length` tokens; a request takes group g with weight (g + 1) ** -zipf."""

    groups: int
    length: int
    zipf: float = 0.0

    def pick(self, rng: Random) -> int:
        weights = list(accumulate((group + 1) ** -self.zipf for group in range(self.groups)))
        return rng.choices(range(self.groups), cum_weights=weights)[0]


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths and the structure of a synthetic workload; tokens and seconds."""

    input_length: Length
    output_length: Length
    shared: SharedPrefix | None = None
    turns: int = 1
    think: float = 0.0


def join(head: Prompt, tail: Prompt) -> Prompt:
    if isinstance(head, list) and isinstance(tail, list):
        return head + tail
    return f"{head} {tail}"


def synthetic(shape: Shape, filler: Filler, seed: str) -> Iterator[Conversation]:
    """Random prompts; `seed` already contains the nonce of the run."""
    for index in count():
        rng = Random(f"{seed}:{index}")
        yield Conversation(tuple(_turn(shape, filler, seed, rng, number) for number in range(shape.turns)))


def _turn(shape: Shape, filler: Filler, seed: str, rng: Random, number: int) -> Turn:
    prompt = filler.fill(rng, shape.input_length(rng))
    if shape.shared and number == 0:
        group = Random(f"{seed}:prefix:{shape.shared.pick(rng)}")
        prompt = join(filler.fill(group, shape.shared.length), prompt)
    return Turn(prompt, shape.output_length(rng), shape.think)


def from_texts(texts: list[str], output_length: Length, seed: str, mark: bool) -> Iterator[Conversation]:
    """The given prompts in order, again and again; `mark` puts a word in front that no other request has."""
    for index in count():
        rng = Random(f"{seed}:{index}")
        text = texts[index % len(texts)]
        prompt = f"[{rng.getrandbits(64):016x}] {text}" if mark else text
        yield Conversation((Turn(prompt, output_length(rng)),))


def read_texts(path: Path, length: int) -> list[str]:
    """A .jsonl of prompts (strings, or objects with `prompt` or `text`), or a text in pieces of `length` words."""
    if path.suffix == ".jsonl":
        texts = [_prompt_of(line, path, number) for number, line in _numbered(path)]
    else:
        words = path.read_text("utf-8").split()
        texts = [" ".join(words[start : start + length]) for start in range(0, len(words), length)]
    if not texts:
        raise ValueError(f"{path}: no prompt in it")
    return texts


def _prompt_of(line: str, path: Path, number: int) -> str:
    value = _json(line, path, number)
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{path}:{number}: expected a string, or an object with a `prompt` or `text` string")
    return text


def read_trace(path: Path, filler: Filler, seed: str, speedup: float) -> Iterator[Conversation]:
    """Each line one request, in order of time.

    Own form: {"at": seconds, "input_length" or "prompt", "output_length"}. Mooncake's: {"timestamp": milliseconds,
    "input_length", "output_length", "hash_ids"}, where equal ids are equal blocks of 512 tokens.
    """
    for number, line in _numbered(path):
        row = _json(line, path, number)
        try:
            at = row["at"] if "at" in row else row["timestamp"] / 1000
            turn = Turn(_trace_prompt(row, filler, f"{seed}:{number}", seed), int(row["output_length"]))
            yield Conversation((turn,), float(at) / speedup)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{number}: not a trace line ({error!r}); expected `at` or `timestamp`, "
                "`input_length` or `prompt`, and `output_length`"
            ) from None


def _trace_prompt(row: dict[str, Any], filler: Filler, own_seed: str, seed: str) -> Prompt:
    if "prompt" in row:
        prompt: Prompt = row["prompt"]
        return prompt
    length = int(row["input_length"])
    blocks: list[int] = row.get("hash_ids", [])
    if not blocks:
        return filler.fill(Random(own_seed), length)
    sizes = [min(MOONCAKE_BLOCK, length - start * MOONCAKE_BLOCK) for start in range(len(blocks))]
    prompt = filler.fill(Random(f"{seed}:block:{blocks[0]}"), sizes[0])
    for block, size in zip(blocks[1:], sizes[1:], strict=True):
        prompt = join(prompt, filler.fill(Random(f"{seed}:block:{block}"), max(1, size)))
    return prompt


def trace_line(conversation: Conversation, at: float) -> str:
    """The own form of one conversation's first turn, which `read_trace` reads back exactly."""
    turn = conversation.turns[0]
    return json.dumps({"at": round(at, 6), "prompt": turn.prompt, "output_length": turn.max_tokens})


def repeated(make: Callable[[], Iterator[Conversation]], distinct: int) -> Iterator[Conversation]:
    """The first `distinct` conversations, again and again: what a warm cache has seen."""
    pool = list(islice(make(), distinct))
    while True:
        yield from pool


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not JSON ({error})") from None
