"""The demo model against transformers reading the same file: two programs that share no code with each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from convert.demo import demo_model_file
from convert.errors import ConvertError
from convert.formats.huggingface import open_huggingface
from convert.forward import logits
from convert.pipeline import convert
from convert.readings import canonical_reading
from convert.verify import probe_ids


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_demo_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Within ten times the difference between transformers' own eager and sdpa attention."""
    try:
        path = demo_model_file()
    except ConvertError as error:
        pytest.skip(str(error))
    report = convert(path, tmp_path / "demo")
    assert report is not None and report["proof"]["source_pairing"]["verdict"] == "confirmed"
    assert report["proof"]["text"]["verdict"] == "confirmed"
    ids, _ = probe_ids(tmp_path / "demo")
    want = {kind: transformers_logits(path, ids, kind) for kind in ("eager", "sdpa")}
    folder = open_huggingface(tmp_path / "demo")
    ours = logits(canonical_reading(folder.table, folder.raw), ids)
    own = np.abs(want["eager"] - want["sdpa"]).max()
    difference = np.abs(ours - want["eager"]).max()
    print(
        f"transformers eager against sdpa {own:.2e}, ours against eager {difference:.2e}, seconds {report['seconds']}"
    )
    assert difference <= 10 * own


def transformers_logits(path: Path, ids: list[int], attention: str) -> NDArray[np.float32]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        out: NDArray[np.float32] = model(torch.tensor([ids])).logits[0].numpy()
    return out
