"""Every reader against damage: it still converts and verifies, or one line says what is wrong and nothing is left.

Deterministic. More memory than a constant, or more than some seconds of work for a tiny file, fails as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.__main__ import main_convert
from convert.tokenizer import charsmap, tiktoken
from tests.convert_damage import READERS, Sound, damaged

FLIPS, CUTS = 150, 60
CONSTANT_BYTES = 400_000_000
CPU_SECONDS = 20.0


@pytest.fixture(params=READERS)
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> Sound:
    folder = tmp_path / "source"
    folder.mkdir()
    return READERS[request.param]()(folder)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and thousands of small files are written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def small_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's file has 128,000 lines, which would take a second a case."""
    monkeypatch.setattr(tiktoken, "LLAMA3_RANKS", 30)


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Anonymous memory above what the process has now raises MemoryError, a long computation TimeoutError."""
    status = Path("/proc/self/status").read_text()
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + CONSTANT_BYTES, before[1]))
    handler = signal.signal(signal.SIGVTALRM, too_long)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, handler)
    resource.setrlimit(resource.RLIMIT_DATA, before)


def too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {CPU_SECONDS} s of CPU for a file of a few kilobytes")


def attempt(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """The line of refusal, None if it converted; either way the folder beside the source is as it should be."""
    out = tmp_path / "out"
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    code = main_convert([str(sound.source), str(out)])
    error = capsys.readouterr().err
    left = sorted(path.name for path in tmp_path.iterdir())
    if code == 0:
        assert left == ["out", "source"] and (out / "conversion_report.json").is_file()
        shutil.rmtree(out)
        return None
    assert code == 1 and left == ["source"]
    lines = error.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"ropeway convert: {tmp_path / 'source'}"), error
    return lines[0]


def test_undamaged_it_converts(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attempt(sound, tmp_path, capsys) is None


def test_truncated_where_a_structure_begins(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = sound.file.read_bytes()
    places = sorted(set(sound.boundaries))
    refused = 0
    for length in random.Random(0).sample(places, min(len(places), CUTS)):
        with damaged(sound.file, whole[:length]):
            refused += attempt(sound, tmp_path, capsys) is not None
    assert refused


def test_flipped_bytes(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One to four bytes anywhere in the structures; half of the time just one bit."""
    whole = sound.file.read_bytes()
    dice = random.Random(sound.file.name)
    first = min(sound.boundaries) if sound.file.name.endswith("pth") else 0
    refused = 0
    slow = sound.file.name in ("tekken.json", "tokenizer.model")  # most damage gives another sound vocabulary
    for _ in range(FLIPS // 4 if slow else FLIPS):
        raw = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(first, sound.header_end)
            raw[at] = raw[at] ^ (1 << dice.randrange(8)) if dice.random() < 0.5 else dice.randrange(256)
        with damaged(sound.file, bytes(raw)):
            refused += attempt(sound, tmp_path, capsys) is not None
    assert refused


NUMBER = re.compile(rb"(?<=[ :\[])-?\d+(?:\.\d+)?(?=[,\]}])")
ABSURD = [b"-1", b"0", b"1", b"1e308", b"1" * 400, b"1" * 5000, b"null", b"true", b'"x"', b"[]", b"{}", b"NaN"]
ABSURD += [b"Infinity"]


@pytest.mark.parametrize("sound", ["safetensors", "params.json", "config.json", "tekken"], indirect=True)
def test_absurd_numbers_in_json(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number in turn; a header of safetensors keeps its length by what follows it."""
    whole = sound.file.read_bytes()
    places = list(NUMBER.finditer(whole, 0, sound.header_end))
    for place in random.Random(0).sample(places, min(len(places), 16)):
        for number in ABSURD:
            raw = whole[: place.start()] + number + whole[place.end() :]
            if sound.file.suffix == ".safetensors":
                raw = (sound.header_end - 8 + len(number) - len(place[0])).to_bytes(8, "little") + raw[8:]
            with damaged(sound.file, raw):
                attempt(sound, tmp_path, capsys)


@pytest.mark.parametrize("sound", ["params.json", "config.json", "index.json", "tekken"], indirect=True)
@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"[]", b"1", b'"\\ud800"'])
def test_json_that_is_none(raw: bytes, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with damaged(sound.file, raw):
        line = attempt(sound, tmp_path, capsys)
    assert line is not None


# ---- made to hurt -----------------------------------------------------------------------------------------


def refusal(sound: Sound, raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with damaged(sound.file, raw):
        line = attempt(sound, tmp_path, capsys)
    assert line is not None
    return line


def safetensors_with(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


def row(begin: int, end: int, dtype: str = "U8") -> str:
    return f'{{"dtype":"{dtype}","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


@pytest.mark.parametrize("sound", ["safetensors"], indirect=True)
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "do not hold its header"),
        (safetensors_with(f'{{"a":{row(0, 4)},"b":{row(2, 6)}}}', bytes(6)), "tensor b starts at"),
        (safetensors_with(f'{{"a":{row(0, 4)},"a":{row(0, 4)}}}', bytes(4)), "'a' stands there twice"),
        (safetensors_with(f'{{"a":{row(0, 4)}}}', bytes(3)), "its header promises"),
        (safetensors_with(f'{{"a":{row(0, 4)}}}', bytes(5)), "its header promises"),
        (safetensors_with(f'{{"a":{row(4, 0, "F4")}}}', bytes(4)), "broken safetensors header"),
        (safetensors_with("[" * 100_000, b""), "broken safetensors header"),
        (safetensors_with('{"a":' * 100_000, b""), "broken safetensors header"),
    ],
)
def test_safetensors_headers_that_lie(
    raw: bytes, words: str, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(sound, raw, tmp_path, capsys)


@pytest.mark.parametrize("sound", ["safetensors"], indirect=True)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(
    value: float, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = sound.file.read_bytes()
    line = refusal(sound, raw[:-4] + struct.pack("<f", value), tmp_path, capsys)
    assert re.search(r"consolidated\.safetensors at byte \d+: tensor '.*' holds NaN or inf", line)


def archive(path: Path, pickled: bytes, bomb_megabytes: int = 0) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", bytes(4))
        if bomb_megabytes:
            entry = zipfile.ZipInfo("archive/byteorder")
            entry.compress_type = zipfile.ZIP_DEFLATED
            with file.open(entry, "w") as unpacked:
                for _ in range(bomb_megabytes):
                    unpacked.write(bytes(1_000_000))
    raw = path.read_bytes()
    path.unlink()
    return raw


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").mkdir()
    sound = READERS["pth"]()(tmp_path / "source")
    raw = archive(sound.source / "bomb", b"\x80\x02}.", bomb_megabytes=CONSTANT_BYTES // 1_000_000 + 50)
    assert len(raw) < 1_000_000
    assert "big-endian" in refusal(sound, raw, tmp_path, capsys)


EXPANDED = (
    b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
)
EXPANDED += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00J\xff\xff\xff\x7f\x85K\x00\x85\x89NtRs."
"""A tensor of two thousand million values, all of them the one that is stored: its stride is 0."""


@pytest.mark.parametrize("sound", ["pth"], indirect=True)
@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "wants room for 2147483647 objects"),
        (b"\x80\x02\x8e" + (2**40).to_bytes(8, "little") + b".", "damaged"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.", "the pickle asks for os.system: refused"),
        (b"\x80\x02c__builtin__\neval\n.", "the pickle asks for __builtin__.eval: refused"),
        (b"\x80\x02]" + b"]a" * 10 + b".", "holds a list"),
        (EXPANDED, "a tensor of shape (2147483647,) does not fit its storage"),
    ],
)
def test_pickles_made_to_hurt(
    pickled: bytes, words: str, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = archive(sound.source / "made", pickled)
    assert words in refusal(sound, raw, tmp_path, capsys)


@pytest.mark.parametrize("sound", ["index.json"], indirect=True)
@pytest.mark.parametrize("place", ["../pytorch_model.bin", "/etc/passwd", "", ".", "a/b.bin"])
def test_an_index_that_leaves_the_folder(
    place: str, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.dumps({"weight_map": {"model.norm.weight": place}}).encode()
    assert f"outside the folder: {place!r}" in refusal(sound, raw, tmp_path, capsys)


@pytest.mark.parametrize("sound", ["sentencepiece bpe"], indirect=True)
def test_a_token_of_megabytes(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"a" * 2_000_000
    piece = b"\x0a" + varint(len(text)) + text
    raw = sound.file.read_bytes() + b"\x0a" + varint(len(piece)) + piece
    assert "2000000 characters: not believed" in refusal(sound, raw, tmp_path, capsys)


def varint(number: int) -> bytes:
    return bytes([number & 127]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


@pytest.mark.parametrize("sound", ["tekken"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value"), [("default_vocab_size", 10**12), ("default_num_special_tokens", 10**9), ("pattern", "(((")]
)
def test_tekken_that_asks_for_the_moon(
    key: str, value: Any, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads(sound.file.read_bytes())
    made["config"][key] = value
    line = refusal(sound, json.dumps(made).encode(), tmp_path, capsys)
    assert "not a sound tekken file" in line or "pattern '((('" in line


@pytest.mark.parametrize("sound", ["gguf"], indirect=True)
def test_gguf_counts_beyond_any_model(sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = sound.file.read_bytes()
    key = b"tokenizer.ggml.scores"
    at = raw.index(key) + len(key) + 8
    line = refusal(sound, raw[:at] + (1 << 40).to_bytes(8, "little") + raw[at + 8 :], tmp_path, capsys)
    assert "1099511627776 values are more than any model has" in line


def test_a_normaliser_whose_trie_leads_outside() -> None:
    """The library that runs it would index past its end."""
    units = np.zeros(256, "<u4")
    units[0] = 5 << 10
    whole = (1024).to_bytes(4, "little") + units.tobytes() + b"a\0"
    assert charsmap.is_sound(whole)
    units[0] = 300 << 10
    assert not charsmap.is_sound(whole[:4] + units.tobytes() + b"a\0")
    assert not charsmap.is_sound(whole[:700]) and not charsmap.is_sound(b"")
