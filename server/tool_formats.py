"""How models write tool calls: markers, chosen by what the chat template shows, and the grammar that forces a call.

Knows no requests beyond the tools they offer. A template that cannot show tools gets them in the system message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_FORCED_CALLS = 16
"""A model that must call may call in parallel, but not for ever."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """bare: a message that begins with a brace may be a call. named: name{...} instead of an object with a name.

    list: all calls of a message stand in one JSON list. in_template: False where the template knows no tools.
    """

    name: str
    openers: tuple[str, ...]
    closer: str = ""
    argument_key: str = "arguments"
    bare: bool = False
    named: bool = False
    list: bool = False
    short_ids: bool = False
    in_template: bool = True

    @property
    def ends(self) -> tuple[str, ...]:
        """What may follow a call: the closer, or an opener where a model leaves the closer out."""
        return (*((self.closer,) if self.closer else ()), *self.openers)

    def new_id(self) -> str:
        """Mistral's templates take nine letters and digits alone."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>")
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), argument_key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), named=True, list=True, short_ids=True)
SMOLLM2 = ToolFormat("smollm2", ("<tool_call>",), "</tool_call>", list=True, in_template=False)
FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL, SMOLLM2)}
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def detect(template: str) -> ToolFormat | None:
    """The format that a template teaches. None: it shows tools in a way that is not known here."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return LLAMA3
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    return None if "tools" in template else SMOLLM2


# ---- the grammar of a forced call


def forced_calls(format: ToolFormat, tools: Sequence[dict[str, Any]], parallel: bool, special: dict[str, int]) -> str:
    """Lark of one call, or of several where parallel. special: ids of the markers that are control tokens."""

    def text(value: str) -> str:
        return f"<[{special[value]}]>" if value in special else json.dumps(value, ensure_ascii=False)

    opener, closer = format.openers[0], format.closer

    def repeated(item: str, separator: str) -> str:
        return f"{item} ({json.dumps(separator)} {item}){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else item

    if format.bare:
        start = "call"
    elif format.list:
        ending = f" {text(closer)}" if closer else ""
        start = f'{text(opener)} "[" {repeated("call", ", ")} "]"{ending}'
    else:
        one = f'one: {text(opener)} "\\n" call "\\n" {text(closer)}'
        start = repeated("one", "\n") + "\n" + one
    calls = [f"call_{index}: {call_of(format, tool)}" for index, tool in enumerate(tools)]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    return "\n".join([f"start: {start}", f"call: {names}", *calls])


def call_of(format: ToolFormat, tool: dict[str, Any]) -> str:
    head = f'{{"name": {json.dumps(tool["name"])}, "{format.argument_key}": '
    return f'{json.dumps(head)} %json {json.dumps(tool["parameters"])} "}}"'


# ---- templates that know no tools


def explain_tools(tools: Sequence[dict[str, Any]]) -> str:
    """The system message's part about tools, for a template that has no place for them."""
    listed = json.dumps([{"type": "function", "function": tool} for tool in tools], ensure_ascii=False)
    return (
        f"You can call these functions, described as JSON:\n<tools>{listed}</tools>\n"
        "To call some, answer with nothing but a list of calls between <tool_call> and </tool_call>:\n"
        '<tool_call>[{"name": "a_function", "arguments": {"a_parameter": "a value"}}]</tool_call>\n'
        "If none of them helps, answer in plain words."
    )


def plain_messages(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant texts alone."""
    plain = [plain_message(message) for message in messages]
    if not tools:
        return plain
    if plain[0]["role"] == "system":
        head = plain[0]["content"] + "\n\n" + explain_tools(tools)
        return [plain[0] | {"content": head}, *plain[1:]]
    return [{"role": "system", "content": explain_tools(tools)}, *plain]


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)
    text = message["content"] + f"<tool_call>{calls}</tool_call>"
    return {"role": "assistant", "content": text}
