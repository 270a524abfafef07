"""Tensors of a Hugging Face folder that a model has no use for, each with the reason.

Knows nothing of how they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConvertError
from convert.source import SourceTensor
from model.folder_headers import INVERSE_FREQUENCIES
from model.tensor_shapes import EMBEDDING, HEAD


def leftovers(folder: Path, config: Mapping[str, Any], table: Mapping[str, SourceTensor]) -> dict[str, str]:
    """Name -> reason. Raises ConvertError for a head of its own beside tie_word_embeddings: one of them is wrong."""
    unused = {name: "RoPE table, recomputed" for name in table if name.endswith(INVERSE_FREQUENCIES)}
    if config.get("tie_word_embeddings") is not True or HEAD not in table or EMBEDDING not in table:
        return unused
    if not np.array_equal(table[HEAD].read(), table[EMBEDDING].read()):
        text = f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: set the one that is right"
        raise ConvertError(text, folder)
    return unused | {HEAD: f"equals {EMBEDDING}"}
