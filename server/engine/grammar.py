"""Constraints on output: which tokens may come next, by llguidance.

The one place that holds the bytes of every token in the engine. Knows no requests, no tensors and no schedule.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.messages import GrammarSpec
from server.token_bytes import TokenBytes, read_token_bytes
from server.tokenizer_files import end_ids, read_json

MISSING = "structured output needs llguidance, which is not installed: pip install 'ropeway[grammar]'"
KEPT = 16
"""Compiled grammars kept for the next request that sends the same one."""
LIMITS = {"initial_lexer_fuel": 500_000, "max_lexer_states": 20_000, "verbose_errors": False}
"""A state takes about 2 kB: one grammar grows to 40 MB at most, then its request ends with an error."""


def is_available() -> bool:
    return find_spec("llguidance") is not None


class Matcher:
    """How far one choice has come in its grammar."""

    def __init__(self, library: Any, vocab_size: int) -> None:
        self._library = library
        self._vocab_size = vocab_size

    def mask(self) -> NDArray[np.bool_]:
        """[V]: True for tokens that may come next. An end of text may where the grammar is satisfied."""
        words = np.frombuffer(self._library.compute_bitmask(), np.uint8)
        return np.unpackbits(words, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def accept(self, token: int) -> None:
        self._library.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Nothing but the end of the text can follow."""
        return bool(self._library.is_stopped())

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a token that does not fit, or a grammar that has grown beyond its limits."""
        text: str = self._library.get_error()
        return text.partition("\n")[0] if self._library.is_error() else None

    def copy(self) -> Matcher:
        return Matcher(self._library.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles constraints for one model. folder: its tokenizer.json is read at the first use."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._compiled = lru_cache(KEPT)(self._compile)

    @property
    def num_compiled(self) -> int:
        return self._compiled.cache_info().currsize

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """At the start of the grammar. ValueError says what is wrong with it, or that llguidance is missing."""
        if not is_available():
            raise ValueError(MISSING)
        return self._compiled(spec.text).copy()

    def _compile(self, text: str) -> Matcher:
        """The first mask builds tables that copies share, so it is made here."""
        from llguidance import LLMatcher, LLParserLimits

        library = LLMatcher(self._vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher = Matcher(library, self._vocab_size)
        if matcher.error is None:
            matcher.mask()
        if matcher.error is not None:
            raise ValueError(matcher.error)
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        description = read_json(self._folder / "tokenizer.json")
        ends = sorted(end_ids(self._folder))
        if not ends:
            raise ValueError("structured output needs an end-of-text token, and this model names none")
        return make_vocabulary(read_token_bytes(description), ends, self._vocab_size)


class TokenTable:
    """What llguidance asks of a tokenizer. Text that a grammar forces is cut into the longest tokens that fit."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes, end: int, vocab_size: int) -> None:
        self.eos_token_id = end
        self.tokens = [vocabulary[token] for token in range(vocab_size)]
        self.special_token_ids = sorted(vocabulary.special)
        self.library: Any = None

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self.library.greedy_tokenize(text.decode()) if self.library is not None else []
        return ids


def make_vocabulary(vocabulary: TokenBytes, ends: list[int], vocab_size: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    table = TokenTable(vocabulary, ends[0], vocab_size)
    table.library = LLTokenizer(TokenizerWrapper(table), n_vocab=vocab_size, eos_token=[*ends])
    return table.library


def finished(text: str) -> str:
    """The grammar with every part written as GBNF or Lark ("ebnf") in the one form that the matcher reads."""
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = json.loads(text)
    for part in grammar["grammars"]:
        if "ebnf" in part:
            part["lark_grammar"] = any_to_lark(part.pop("ebnf"))
    return json.dumps(grammar)
