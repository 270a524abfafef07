"""How each named pre-tokenizer of GGUF cuts text before byte-level BPE.

Knows nothing of vocabularies. The name is all a file carries; a name that is not in this table is refused, because a
wrong cut still gives plausible text.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
TEKKEN = rf"{TEKKEN_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cut:
    """regex None: GPT-2's own. digits: every digit is a piece. ignore_merges: a whole word in the vocabulary wins.

    add_bos: whether llama.cpp puts BOS first when the file does not say.
    """

    regex: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The `tokenizers` object; ByteLevel comes last and maps bytes to printable characters."""
        if self.regex is not None:
            parts = [Split(Regex(self.regex), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        elif self.digits:
            parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        else:
            return ByteLevel(add_prefix_space=False)
        return Sequence(parts)


_GPT2, _DIGITS = Cut(), Cut(digits=True)
_LLAMA3 = Cut(LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2 = Cut(QWEN2)

CUTS: dict[str, Cut] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "dbrx": Cut(LLAMA3),
    "smaug-bpe": Cut(LLAMA3),
    "tekken": Cut(TEKKEN, ignore_merges=True, add_bos=True),
}
