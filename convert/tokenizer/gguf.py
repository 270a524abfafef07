"""GGUF metadata to tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

Knows nothing of tensors. What the file does not say (the flags of added tokens, the exact normaliser) follows
llama.cpp's behaviour; the tests hold every vocabulary to its golden ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from convert.errors import ConvertError
from convert.tokenizer.assemble import Special, finish, special_files
from convert.tokenizer.pre_tokenizers import CUTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PREFIX = "tokenizer.ggml."


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """File name -> text. Raises ConvertError for a model or pre-tokenizer that is not known. Empty: no tokenizer."""
    model = metadata.get(PREFIX + "model")
    if model is None:
        return {}
    tokens, types = metadata.get(PREFIX + "tokens"), metadata.get(PREFIX + "token_type")
    if not isinstance(tokens, list) or types is None or len(types) != len(tokens):
        raise ConvertError("tokenizer.ggml.tokens and token_type are missing or differ in length", path)
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, path)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types, path)
    else:
        raise ConvertError(f"tokenizer model {model!r} is not supported (known: gpt2, llama)", path)
    _add_special(tokenizer, tokens, types)
    special = _special(metadata, tokens, add_bos, path)
    finish(tokenizer, special)
    files = {"tokenizer.json": tokenizer.to_str(), **special_files(special)}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    return files


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata.get(PREFIX + "pre")
    cut = CUTS.get(str(name))
    if cut is None:
        raise ConvertError(f"pre-tokenizer {name!r} is not known; guessing would give wrong tokens", path)
    lines = metadata.get(PREFIX + "merges")
    if not isinstance(lines, list):
        raise ConvertError("tokenizer.ggml.merges is missing", path)
    merges = [tuple(line.split(" ", 1)) for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise ConvertError("tokenizer.ggml.merges: a line is not two pieces", path)
    model = _bpe(path, vocab=_vocab(tokens, path), merges=merges, ignore_merges=cut.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], path: Path
) -> tuple[Tokenizer, bool]:
    scores = metadata.get(PREFIX + "scores")
    if scores is None or len(scores) != len(tokens):
        raise ConvertError("tokenizer.ggml.scores is missing or differs in length from tokens", path)
    vocab = _vocab(tokens, path)
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    unknown = tokens[int(metadata.get(PREFIX + "unknown_token_id", 0))]
    model = _bpe(
        path, vocab=vocab, merges=merges_from_scores(vocab, normal, scores), unk_token=unknown, fuse_unk=True,
        byte_fallback=BYTE in types,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def merges_from_scores(vocab: dict[str, int], normal: set[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece keeps scores, BPE wants merges: every cut of a normal token into two known ones, best score first.

    Equal scores go by the ids of the parts.
    """
    ranked = []
    for token in normal:
        index = vocab[token]
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-float(scores[index]), left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _bpe(path: Path, **parts: Any) -> BPE:
    try:
        return BPE(**parts)
    except Exception as error:  # the library raises plain Exception for merges outside the vocabulary
        raise ConvertError(f"tokenizer: {error}", path) from error


def _vocab(tokens: list[str], path: Path) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ConvertError(f"token {twice!r} appears twice in tokenizer.ggml.tokens", path)
    return vocab


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Control and unknown tokens are special (not shown in text); user-defined ones are matched whole but shown."""
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _special(metadata: Mapping[str, Any], tokens: list[str], add_bos: bool, path: Path) -> Special:
    def token_id(name: str) -> int | None:
        value = metadata.get(f"{PREFIX}{name}_token_id")
        if value is not None and not 0 <= int(value) < len(tokens):
            raise ConvertError(f"{PREFIX}{name}_token_id {value} is outside the vocabulary of {len(tokens)}", path)
        return None if value is None else int(value)

    stops = [token_id(name) for name in ("eos", "eot", "eom")]
    return Special(
        tokens=tokens, bos=token_id("bos"), stops=tuple(dict.fromkeys(s for s in stops if s is not None)),
        unknown=token_id("unknown"), pad=token_id("padding"),
        add_bos=bool(metadata.get(PREFIX + "add_bos_token", add_bos)),
        add_eos=bool(metadata.get(PREFIX + "add_eos_token", False)),
    )  # fmt: skip
