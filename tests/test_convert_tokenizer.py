"""Tokenizers rebuilt from GGUF metadata: golden ids of real vocabularies, special tokens, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from convert.errors import ConvertError
from convert.formats.gguf import read_gguf
from convert.tokenizer.gguf import tokenizer_files

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder"]
NOWHERE = Path("model.gguf")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_golden_ids(name: str, shared_data: Path) -> None:
    """The cases stand between separator lines; the text after the last separator is empty and has no line of ids."""
    path = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_str(tokenizer_files(read_gguf(path).metadata, path)["tokenizer.json"])
    *cases, last = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    golden = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert last == "" and tokenizer.encode("", add_special_tokens=False).ids == []
    assert [tokenizer.encode(case, add_special_tokens=False).ids for case in cases] == golden
    assert len(golden) == 46


def metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of a few tokens; changes replace keys below tokenizer.ggml., None removes one."""
    keys: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "Ġ", "ab", "<s>", "</s>", "<eot>", "<tool>"],
        "token_type": [1, 1, 1, 1, 3, 3, 3, 4], "merges": ["a b"], "bos_token_id": 4, "eos_token_id": 5,
        "eot_token_id": 6,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


def test_special_tokens_are_hidden_and_user_defined_ones_shown() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_files(metadata(), NOWHERE)["tokenizer.json"])
    ids = tokenizer.encode("ab<eot><tool>").ids
    assert ids == [3, 6, 7]
    assert tokenizer.decode(ids) == "ab<tool>"


def test_every_token_that_ends_an_answer_is_an_eos() -> None:
    generation = json.loads(tokenizer_files(metadata(), NOWHERE)["generation_config.json"])
    assert generation == {"bos_token_id": 4, "eos_token_id": [5, 6]}


def test_bos_goes_in_front_when_the_file_says_so() -> None:
    files = tokenizer_files(metadata(add_bos_token=True), NOWHERE)
    assert Tokenizer.from_str(files["tokenizer.json"]).encode("ab").ids == [4, 3]
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True


def test_chat_template_is_carried_over() -> None:
    files = tokenizer_files(metadata() | {"tokenizer.chat_template": "{{ messages }}"}, NOWHERE)
    assert files["chat_template.jinja"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "some-new-one"}, "pre-tokenizer 'some-new-one' is not known"),
        ({"pre": None}, "pre-tokenizer None is not known"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokens": ["a", "a", "Ġ", "ab", "<s>", "</s>", "<eot>", "<tool>"]}, "'a' appears twice"),
        ({"token_type": [1]}, "differ in length"),
        ({"eos_token_id": 99}, "outside the vocabulary of 8"),
        ({"merges": ["a c"]}, "c"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConvertError, match=reason):
        tokenizer_files(metadata(**changes), NOWHERE)


def test_metadata_without_a_tokenizer_gives_no_files() -> None:
    assert tokenizer_files({}, NOWHERE) == {}
