"""llama2.c's training checkpoints (.pt): a torch archive with the tensors under "model", the sizes under "model_args".

Knows nothing of pickles. Names are Meta's; a model that was compiled carries a prefix on each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.formats.meta_config import meta_config
from convert.formats.meta_names import hugging_face_names
from convert.formats.torch_pickle import read_torch, state_tensors
from convert.source import Source
from convert.tokenizer.llama2c import tokenizer_files

COMPILED = "_orig_mod."
ZIP_MAGIC = b"PK\x03\x04"
DEFAULTS = {"norm_eps": 1e-5}  # of the program that trains: it writes neither this nor a RoPE base


def open_llama2c_torch(path: Path) -> Source:
    """Raises ConvertError for an archive without these two keys: alone, a file of tensors does not say its heads."""
    state = read_torch(path)
    model, args = state.get("model"), state.get("model_args")
    if not isinstance(model, dict) or not isinstance(args, dict):
        text = f"a torch archive of {', '.join(list(map(str, state))[:3])}, not of model and model_args (llama2.c)"
        raise ConvertError(f"{text}: give the folder that it belongs to, with its params.json or config.json", path)
    if not all(isinstance(key, str) for key in (*model, *args)):
        raise ConvertError("model and model_args have keys that are not names", path)
    table = {name.removeprefix(COMPILED): tensor for name, tensor in state_tensors(path, model).items()}
    table = {name: replace(tensor, name=name) for name, tensor in table.items()}
    params: dict[str, Any] = DEFAULTS | {key: value for key, value in args.items() if key != "dropout"}
    config = meta_config(path, params, table, "llama")
    dropped = {"output.weight": "equals tok_embeddings.weight"} if config["tie_word_embeddings"].value else {}
    dropped = {name: reason for name, reason in dropped.items() if name in table}
    names = {name: target for name, target in hugging_face_names(table).items() if name not in dropped}
    vocabulary = config["vocab_size"].value
    return Source(
        path=path, format="llama2c-torch", architecture="llama", pairing="adjacent", config=config, names=names,
        table=table, raw=params, dropped=dropped, tokenizer_files=lambda: tokenizer_files(path, vocabulary),
        unused={key: "state of the training" for key in state if key not in ("model", "model_args")},
    )  # fmt: skip
