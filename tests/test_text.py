"""Detokenising and stop strings: whatever the split, the text is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from server.text import StopFinder, TextStream, decode
from server.token_bytes import TokenBytes, read_token_bytes
from server.tokenizer import Tokenizer
from tests.conftest import EOS, make_byte_tokenizer

BYTES = read_token_bytes(json.loads(make_byte_tokenizer().to_str()))
SPACES_TAKEN = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sentencepiece_like(*pieces: str, strip: bool = True) -> tuple[Library, TokenBytes]:
    """Llama 2's decoder over 256 byte tokens, then the given pieces from id 256 on."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + list(pieces)
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    description = json.loads(make_byte_tokenizer().to_str()) | {
        "model": {"type": "BPE", "vocab": {name: id for id, name in enumerate(names)}, "merges": []},
        "decoder": {"type": "Sequence", "decoders": decoders + ([SPACES_TAKEN] if strip else [])},
        "added_tokens": [],
        "pre_tokenizer": None,
    }
    return Library.from_str(json.dumps(description)), read_token_bytes(description)


def feed_all(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.feed(token) for token in tokens), stream.finish()]


@given(st.text())
def test_text_survives_byte_by_byte(text: str) -> None:
    assert decode(BYTES, list(text.encode())) == text


@given(st.binary())
def test_broken_bytes_become_what_python_makes_of_them(raw: bytes) -> None:
    assert decode(BYTES, list(raw)) == raw.decode(errors="replace")


@given(st.lists(st.integers(0, 258)))
def test_equals_the_library_for_any_tokens(tokens: list[int]) -> None:
    assert decode(BYTES, tokens) == make_byte_tokenizer().decode(tokens, skip_special_tokens=True)


@given(st.lists(st.sampled_from(["▁", "▁leading", "word", "▁▁", "."]), max_size=8), st.booleans())
def test_leading_spaces_are_those_of_full_decode(words: list[str], strip: bool) -> None:
    pieces = ["▁", "▁leading", "word", "▁▁", "."]
    library, vocabulary = sentencepiece_like(*pieces, strip=strip)
    tokens = [256 + pieces.index(word) for word in words]
    assert decode(vocabulary, tokens) == library.decode(tokens)


def test_a_text_that_goes_on_keeps_its_first_space() -> None:
    _, vocabulary = sentencepiece_like("▁world")
    assert decode(vocabulary, [256], at_start=False) == " world"
    assert decode(vocabulary, [256], at_start=True) == "world"


def test_byte_fallback_makes_characters_across_tokens() -> None:
    _, vocabulary = sentencepiece_like("▁a", strip=False)
    stream = TextStream(vocabulary)
    assert feed_all(stream, [*"é😀".encode(), 256]) == ["", "é", "", "", "", "😀", " a", ""]


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_cut_character_is_one_replacement(cut: int) -> None:
    assert decode(BYTES, list("a😀".encode())[: 1 + cut]) == ("a😀" if cut == 4 else "a\ufffd")


def test_special_tokens_are_not_text_unless_asked_for() -> None:
    tokens = [*b"a", EOS, *b"b"]
    assert decode(BYTES, tokens) == "ab"
    assert decode(BYTES, tokens, skip_special=False) == "a<|eos|>b"


def test_ids_that_no_token_has_are_empty() -> None:
    assert decode(BYTES, [97, 5000, 98]) == "ab"


def test_no_clean_up_rewrites_text() -> None:
    assert decode(BYTES, list(b"    . , don 't")) == "    . , don 't"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    description = json.loads(make_byte_tokenizer().to_str()) | {"decoder": {"type": "WordPiece", "prefix": "##"}}
    with pytest.raises(ValueError, match="WordPiece"):
        read_token_bytes(description)


# ---- stop strings


def run_stops(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder = StopFinder(stops)
    text = "".join(finder.feed(part) for part in parts if finder.found is None)
    return text + ("" if finder.found else finder.finish()), finder.found


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(places)]


SHORT = st.text("ab.", min_size=1, max_size=4)


@given(st.text("ab.", max_size=30), st.lists(SHORT, min_size=1, max_size=4), st.lists(st.integers(0, 30)))
def test_the_split_changes_nothing(text: str, stops: list[str], borders: list[int]) -> None:
    whole = run_stops([text], stops)
    assert run_stops(list(text), stops) == whole
    assert run_stops(cut(text, borders), stops) == whole


@given(st.text("ab.", max_size=30), st.lists(SHORT, min_size=1, max_size=4))
def test_the_order_of_stops_changes_nothing(text: str, stops: list[str]) -> None:
    assert run_stops([text], stops) == run_stops([text], stops[::-1])


@given(st.text("ab.", max_size=30), st.lists(SHORT, min_size=1, max_size=4))
def test_no_stop_is_shown_and_nothing_is_lost(text: str, stops: list[str]) -> None:
    shown, found = run_stops(list(text), stops)
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown + (found or ""))
    assert found is not None or shown == text


def test_the_leftmost_match_ends_the_text() -> None:
    assert run_stops(["..A..B.."], ["B", "A"]) == ("..", "A")
    assert run_stops(["Answer\n\nmore"], ["\n"]) == ("Answer", "\n")


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_across_tokens_ends_the_stream(include: bool) -> None:
    stream = TextStream(BYTES, ["beta gamma"], include_stop=include)
    parts = feed_all(stream, list(b"alpha beta gamma delta"))
    assert "".join(parts) == ("alpha beta gamma" if include else "alpha ")
    assert stream.stop == "beta gamma"
    assert parts[len("alpha beta gamma") :] == [""] * (len(" delta") + 1)


def test_text_that_may_be_a_stop_is_held_until_it_is_not() -> None:
    stream = TextStream(BYTES, ["END"])
    assert [stream.feed(byte) for byte in b"xEEND"] == ["x", "", "E", "", ""]
    assert feed_all(TextStream(BYTES, ["END"]), list(b"xEN")) == ["x", "", "", "EN"]


def test_a_stop_of_characters_that_tokens_cut() -> None:
    stream = TextStream(BYTES, ["é😀"])
    assert "".join(feed_all(stream, list("café😀!".encode()))) == "caf"


def test_a_broken_character_at_the_end_can_complete_a_stop() -> None:
    stream = TextStream(BYTES, ["a\ufffd"])
    assert "".join(feed_all(stream, [*b"xa", 0xF0])) == "x"
    assert stream.stop == "a\ufffd"


# ---- the wrapper


def test_real_tokenizer_round_trips_and_counts_ends(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "stories260K" / "hf")
    text = "Once upon a time, there was a café — 日本 😀  two spaces."
    [ids] = tokenizer.encode([text])
    assert ids[0] == 1 and decode(tokenizer.vocabulary, ids) == text
    assert tokenizer.end_ids == {2}


def test_end_ids_come_from_generation_config_first(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def end_ids(generation: dict[str, Any]) -> frozenset[int]:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (tmp_path / name).write_bytes((tiny_model() / name).read_bytes())
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return Tokenizer.from_folder(tmp_path).end_ids

    assert end_ids({"eos_token_id": [256, 257]}) == {256, 257}
    assert end_ids({"eos_token_id": 258}) == {258}
    assert end_ids({}) == end_ids({"eos_token_id": None}) == {257}
    with pytest.raises(ValueError, match="eos_token_id is '</s>', expected int"):
        end_ids({"eos_token_id": "</s>"})


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
