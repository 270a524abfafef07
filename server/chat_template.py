"""Chat messages to one prompt text, with the checkpoint's own Jinja template in a sandbox.

Follows the conventions that templates are written for (block trimming, raise_exception, strftime_now, tojson, the
generation tag). Knows no tokens: keeping the user's text from becoming control tokens is control_tokens.py's job.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.control_tokens import ControlTokens, new_marker
from server.tokenizer_files import read_json

MAX_CHARACTERS = 16_000_000
"""A rendered prompt beyond this is refused while it is being made."""


class TemplateRefusedError(ValueError):
    """The template raised, or could not be rendered; the text is its message."""


class GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; for a prompt only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the tokens it may name. What it refuses is raised as TemplateRefusedError."""

    def __init__(self, source: str, control: ControlTokens, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.source = source
        self._template = environment.from_string(source)
        self._control = control
        self._special_tokens = special_tokens

    def render(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], continue_final: bool = False
    ) -> tuple[str, str]:
        """The prompt text and the marker that shields the user's words in it (roles come from a fixed list).

        continue_final: end the text right after the content of the last message, so that the model goes on with it.
        """
        marker, end = new_marker(), new_marker()
        shielded = [self._control.shield(item, marker) | {"role": item["role"]} for item in messages]
        if continue_final:
            shielded[-1]["content"] += end
        shielded_variables = self._control.shield(variables, marker)
        text = self._generate(shielded_variables | self._special_tokens | {"messages": shielded})
        if continue_final:
            text, found, _ = text.partition(end)
            if not found:
                raise TemplateRefusedError("the chat template does not show the last message: it cannot be continued")
        return text, marker

    def _generate(self, names: dict[str, Any]) -> str:
        parts, length = [], 0
        try:
            for part in self._template.generate(names):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise TemplateRefusedError(f"the rendered prompt is longer than {MAX_CHARACTERS} characters")
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
            raise TemplateRefusedError(f"chat template: {error}") from error
        return "".join(parts)


def load_template(folder: Path, control: ControlTokens, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, else the one in tokenizer_config.json (of a list: "default"), else None."""
    file = folder / "chat_template.jinja"
    source: Any = file.read_text(encoding="utf-8") if file.is_file() else None
    if source is None:
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        source = {item["name"]: item["template"] for item in source}.get("default")
    try:
        return None if source is None else ChatTemplate(source, control, special_tokens)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template of {folder} is broken in line {error.lineno}: {error.message}") from None


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a model would have to read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
