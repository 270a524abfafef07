"""The tokenizer of a checkpoint folder, with what its side files say about ends of text and sampling defaults.

Knows no requests. Long texts are encoded in a thread: `encode_batch_fast` frees the interpreter lock, which `encode`
does not, and makes no offsets, which would take three quarters of the time.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from server.control_tokens import ControlTokens
from server.token_bytes import TokenBytes, read_token_bytes
from server.tokenizer_files import end_ids, read_json, token_text

INLINE_CHARACTERS = 2048
"""Below this a text is encoded at once: the hop to a thread would cost more."""


class Tokenizer:
    """Text to ids, and the bytes of each id. control: the strings that only a template may turn into control tokens."""

    def __init__(self, description: dict[str, Any], settings: dict[str, Any], ends: frozenset[int] = frozenset()):
        self.vocabulary: TokenBytes = read_token_bytes(description)
        self.bos_token = token_text(settings.get("bos_token"))
        self.eos_token = token_text(settings.get("eos_token"))
        added = {item["content"]: item for item in description["added_tokens"]}
        self.end_ids = ends or frozenset(added[text]["id"] for text in [self.eos_token] if text in added)
        is_control = {text: item["special"] or item["id"] in self.end_ids for text, item in added.items()}
        self.control = ControlTokens([text for text, control in is_control.items() if control])
        self._library = Library.from_str(json.dumps(description))
        self._plain, self._control_of_alias = self._make_plain(description, added)
        self._control_ids = frozenset(self._control_of_alias.values())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the end ids of generation_config.json and config.json."""
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json: put one there, or convert again with one")
        return cls(read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json"), end_ids(folder))

    def _make_plain(self, description: dict[str, Any], added: dict[str, Any]) -> tuple[Library, dict[int, int]]:
        """A twin that reads control strings as text and knows the aliases instead; and the control id of each alias."""
        items = [item | {"special": item["special"] or text in self.control.aliases} for text, item in added.items()]
        plain = Library.from_str(json.dumps(description | {"added_tokens": items}))
        plain.encode_special_tokens = True
        flags = ("single_word", "lstrip", "rstrip")
        names = self.control.aliases.items()
        plain.add_tokens(
            [
                AddedToken(alias, normalized=False, **{flag: added[text][flag] for flag in flags})
                for text, alias in names
            ]
        )
        return plain, {plain.token_to_id(alias) or 0: added[text]["id"] for text, alias in names}

    def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Control strings in the texts become control tokens: for prompts that the caller has rendered itself."""
        return [item.ids for item in self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def encode_rendered(self, rendered: str, marker: str) -> list[int]:
        """A rendered chat: only what the template wrote itself becomes a control token (see ControlTokens)."""
        aliased = self.control.alias(rendered, marker)
        ids: list[int] = []
        for id in self._plain.encode_batch_fast([aliased], add_special_tokens=False)[0].ids:
            if id in self._control_of_alias:
                ids.append(self._control_of_alias[id])
            else:
                ids.extend(self._spell(id) if id in self._control_ids else [id])
        return ids

    def _spell(self, id: int) -> list[int]:
        """A control token that the model's own pieces made of plain text: its first character, then the rest."""
        text = self._plain.id_to_token(id) or ""
        return [token.id for part in (text[:1], text[1:]) for token in self._plain.model.tokenize(part)]

    async def encode_aside(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) < INLINE_CHARACTERS:
            return self.encode(texts, add_special_tokens)
        return await asyncio.to_thread(self.encode, texts, add_special_tokens)

    async def encode_rendered_aside(self, rendered: str, marker: str) -> list[int]:
        if len(rendered) < INLINE_CHARACTERS:
            return self.encode_rendered(rendered, marker)
        return await asyncio.to_thread(self.encode_rendered, rendered, marker)
