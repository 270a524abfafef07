"""Tokenizers beside a checkpoint: sentencepiece, tiktoken, tekken, against golden ids or their own library."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from convert.errors import ConvertError
from convert.formats.gguf import read_gguf
from convert.tokenizer.byte_level import byte_alphabet
from convert.tokenizer.folder import folder_tokenizer, tokenizer_file
from convert.tokenizer.pre_tokenizers import LLAMA3
from convert.tokenizer.protobuf import parse_model
from convert.tokenizer.tiktoken import special_tokens


def golden(shared_data: Path, name: str) -> tuple[list[str], list[list[int]]]:
    path = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    cases = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")[:-1]
    return cases, [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]


def encode(files: dict[str, str], text: str) -> list[int]:
    return list(Tokenizer.from_str(files["tokenizer.json"]).encode(text, add_special_tokens=False).ids)


def test_sentencepiece_bpe_gives_the_ids_of_sentencepiece(shared_data: Path) -> None:
    """A Mistral vocabulary on the golden strings, their lines and a page of prose."""
    path = shared_data / "tokenizers" / "mistral_instruct_tokenizer_240323.model.v3"
    tokenizer = Tokenizer.from_str(tokenizer_file(path)["tokenizer.json"])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    cases, _ = golden(shared_data, "llama-spm")
    cases += (shared_data / "botchan_200k.txt").read_text("utf-8")[:20000].splitlines()
    got = [tokenizer.encode(case, add_special_tokens=False).ids for case in cases]
    assert got == [reference.encode(case) for case in cases]
    assert tokenizer.token_to_id("[INST]") == reference.piece_to_id("[INST]")


def test_sentencepiece_unigram_gives_the_ids_of_sentencepiece(shared_data: Path) -> None:
    path = shared_data / "tokenizers" / "test_model.model"
    tokenizer = Tokenizer.from_str(tokenizer_file(path)["tokenizer.json"])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    lines = (shared_data / "botchan_200k.txt").read_text("utf-8").splitlines()[:400]
    assert [tokenizer.encode(line).ids for line in lines] == [reference.encode(line) for line in lines]


WORDS = ("the cat", "the hat", "that rat", "a tree", "her heart", "that other heat", "a great threat")
SPACED = ("the cat", "", " ", "  the  hat ", "the   rat\n", " a", "a  ", "what is not there", "a\t b", "▁the", "  ▁a")


def trained(folder: Path, **settings: Any) -> Path:
    """A tiny model of sentencepiece itself, made of WORDS."""
    lines = [f"{first} and {second}" for first in WORDS for second in WORDS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "trained"), vocab_size=300, hard_vocab_limit=False,
        byte_fallback=True, num_threads=1, minloglevel=2, **settings,
    )  # fmt: skip
    return folder / "trained.model"


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("kind", "rule"), [("bpe", "identity"), ("unigram", "identity"), ("unigram", "nmt_nfkc")])
def test_spaces_are_read_as_the_model_says(kind: str, rule: str, prefix: bool, squeezed: bool, tmp_path: Path) -> None:
    path = trained(
        tmp_path, model_type=kind, normalization_rule_name=rule, add_dummy_prefix=prefix,
        remove_extra_whitespaces=squeezed,
    )  # fmt: skip
    tokenizer = Tokenizer.from_str(tokenizer_file(path)["tokenizer.json"])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in SPACED:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids).lstrip() == reference.decode(ids).lstrip(), text


def test_a_model_that_marks_the_ends_of_words_is_refused(tmp_path: Path) -> None:
    path = trained(tmp_path, model_type="unigram", treat_whitespace_as_suffix=True)
    with pytest.raises(ConvertError, match="treat_whitespace_as_suffix"):
        tokenizer_file(path)


def llama3_ranks(shared_data: Path) -> list[bytes]:
    """The byte strings of Llama 3's vocabulary, from its GGUF."""
    back = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokens = read_gguf(shared_data / "tokenizers" / "ggml-vocab-llama-bpe.gguf").metadata["tokenizer.ggml.tokens"]
    return [bytes(back[char] for char in token) for token in tokens[:128000]]


def test_tiktoken_file_of_llama3_gives_the_golden_ids(shared_data: Path, tmp_path: Path) -> None:
    ranks = llama3_ranks(shared_data)
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(ranks)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    files = folder_tokenizer(tmp_path, llama31=True)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    cases, ids = golden(shared_data, "llama-bpe")
    assert [tokenizer.encode(case, add_special_tokens=False).ids for case in cases] == ids
    assert tokenizer.encode("<|eot_id|>").ids == [128000, 128009]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [128009, 128001, 128008]


def test_special_tokens_of_llama3_and_31() -> None:
    three, three_one = special_tokens(False), special_tokens(True)
    assert len(set(three)) == len(set(three_one)) == 256
    assert (three[4], three[8], three[10]) == (
        "<|reserved_special_token_2|>", "<|reserved_special_token_4|>", "<|reserved_special_token_5|>",
    )  # fmt: skip
    assert (three_one[4], three_one[8], three_one[10]) == ("<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>")
    assert (three[255], three_one[255]) == ("<|reserved_special_token_250|>", "<|reserved_special_token_247|>")


def tekken(ranks: list[bytes], specials: list[str] | None, count: int, more: int = 0) -> dict[str, Any]:
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for i, token in enumerate(ranks)
    ]
    config = {
        "pattern": LLAMA3, "num_vocab_tokens": len(ranks), "default_vocab_size": len(ranks) + count - more,
        "default_num_special_tokens": count, "version": "v7" if specials else "v3",
    }  # fmt: skip
    listed = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(specials or [])]
    return {"config": config, "vocab": vocab} | ({"special_tokens": listed} if specials else {})


def test_tekken_takes_its_regex_from_the_file_and_shifts_ids(shared_data: Path, tmp_path: Path) -> None:
    """Llama 3's bytes dressed as tekken: its golden ids, 1000 higher."""
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(tekken(llama3_ranks(shared_data), ["<unk>", "<s>", "</s>", "[INST]"], 1000)))
    tokenizer = Tokenizer.from_str(folder_tokenizer(tmp_path)["tokenizer.json"])
    cases, ids = golden(shared_data, "llama-bpe")
    got = [tokenizer.encode(case, add_special_tokens=False).ids for case in cases]
    assert got == [[i + 1000 for i in row] for row in ids]
    assert tokenizer.encode("[INST]").ids == [1, 3] and tokenizer.token_to_id("<SPECIAL_999>") == 999


def test_tekken_cuts_the_vocabulary_at_its_default_size(tmp_path: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    files = tokenizer_file(write(tmp_path, json.dumps(tekken(ranks, None, 20, more=1)).encode()))
    assert encode(files, "abc") == [256 + 20, ord("c") + 20]
    assert encode(files, "[TOOL_CALLS]") == [9]


def write(folder: Path, data: bytes) -> Path:
    (folder / "tokenizer").write_bytes(data)
    return folder / "tokenizer"


def test_other_files_are_no_tokenizers(tmp_path: Path) -> None:
    for data in (b"", b"{}", b"{broken", b"\x0a", b"\x0a\x05hello", b"YQ== 0\nbroken", b"Zg== 1\n", bytes(100)):
        assert tokenizer_file(write(tmp_path, data)) == {}, data
    assert folder_tokenizer(tmp_path) == {}


def test_a_tiktoken_file_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="holds 2 ranks, Llama 3 has 128000"):
        tokenizer_file(write(tmp_path, b"YQ== 0\nYg== 1\n"))


@pytest.mark.parametrize("row", [{"rank": 5, "token_bytes": "YQ=="}, {}, {"rank": 0, "token_bytes": "?"}])
def test_a_damaged_tekken_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    value = tekken([b"a"], ["<s>"], 1) | {"vocab": [row]}
    with pytest.raises(ConvertError, match=r"tekken|ranks are not"):
        tokenizer_file(write(tmp_path, json.dumps(value).encode()))


def test_the_beginning_of_a_sentencepiece_model_is_none_and_no_crash(shared_data: Path) -> None:
    raw = (shared_data / "tokenizers" / "test_model.model").read_bytes()[:3000]
    for end in range(0, 3000, 7):
        assert parse_model(raw[:end]) is None, end
