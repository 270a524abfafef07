"""The table in docs/convert.md is the one that the tests give, and every format that is read has a row."""

from __future__ import annotations

import pytest

from convert.canonical import SIDE_FILES
from convert.export import EXPORTS
from convert.formats.gguf_architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from convert.formats.quantised import SCHEMES
from model.config import FAMILIES
from tests.proof_table import ARCHITECTURES, Proof, collected, committed, table


@pytest.fixture(scope="module")
def proofs() -> list[Proof]:
    return collected()


def test_the_committed_table_is_the_generated_one(proofs: list[Proof]) -> None:
    assert committed() == table(proofs), "run python -m tests.proof_table"


def test_no_architecture_and_no_way_back_is_left_out(proofs: list[Proof]) -> None:
    cells = {(kind, architecture) for kind, architecture, _ in proofs}
    assert set(ARCHITECTURES) == FAMILIES.keys() == {architecture for _, architecture in cells}
    assert {row.model_type for row in GGUF_ARCHITECTURES.values()} <= {a for kind, a in cells if kind == "GGUF"}
    assert {"to hf"} | {f"to {to}" for to in EXPORTS} <= {kind for kind, _ in cells}


def test_every_scheme_of_quantised_safetensors_has_a_row(proofs: list[Proof]) -> None:
    rows = {kind.removeprefix("safetensors, ").split()[0] for kind, _, _ in proofs if kind.startswith("safetensors")}
    assert rows == {name.split("-")[0] for name in SCHEMES}
    assert set(SIDE_FILES.values()) & SCHEMES.keys() == {"gptq", "awq"}
