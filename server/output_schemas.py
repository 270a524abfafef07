"""The parts of a request body that shape its output: structured output, tools and their calls.

Knows no model: whether it can call tools, and whether a grammar compiles, is found out later.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from server.body import Body
from server.constraints import Part, choice_part, grammar_part, json_part, regex_part

MAX_TOOLS = 128
MAX_GRAMMAR_CHARACTERS = 1_000_000
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchema(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """text asks for nothing. A schema is always enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema")
        return self

    def part(self) -> Part | None:
        if self.type == "text":
            return None
        return json_part(self.json_schema.schema_ if self.json_schema is not None else {"type": "object"})


class StructuredOutputs(Body):
    """vLLM's names. One of json, json_object, regex, choice and grammar (GBNF or Lark)."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> StructuredOutputs:
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(item is not None for item in given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        unknown = [name for name, value in (self.model_extra or {}).items() if value is not None]
        if unknown:
            raise ValueError(f"{ascii(unknown[0])[1:-1]} is not supported")
        return self

    def part(self) -> Part:
        white_space = not self.disable_any_whitespace
        if self.json_ is not None:
            return json_part(as_schema(self.json_), white_space=white_space)
        if self.regex is not None:
            return regex_part(self.regex)
        if self.choice is not None:
            return choice_part(self.choice)
        if self.grammar is not None:
            return grammar_part(self.grammar)
        return json_part({"type": "object"}, white_space=white_space)


def as_schema(given: dict[str, Any] | str) -> dict[str, Any]:
    """ValueError if a text is no JSON object."""
    schema = json.loads(given) if isinstance(given, str) else given
    if not isinstance(schema, dict):
        raise ValueError("json: a schema must be a JSON object")
    return schema


class ShapedBody(Body):
    """Ways to say what the output must look like; at most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    def shape(self) -> tuple[str, Part] | None:
        """(the field that asks, the grammar). ValueError for two that ask, or for a schema that is no JSON."""
        asked: dict[str, Part | None] = {}
        if self.response_format is not None:
            asked["response_format"] = self.response_format.part()
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs.part()
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                asked[f"guided_{kind}"] = StructuredOutputs.model_validate({kind: value}).part()
        wanted = [(name, part) for name, part in asked.items() if part is not None]
        if len(wanted) > 1:
            raise ValueError(f"{wanted[0][0]} and {wanted[1][0]} exclude each other")
        return wanted[0] if wanted else None


# ---- tools


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """As templates and grammars want it: parameters are always an object's schema."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, "description": self.description or "", "parameters": parameters}


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedChoice, Tag("function")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "function"),
]


class ToolsBody(Body):
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_tools(self) -> ToolsBody:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) != len(names):
            raise ValueError("tools: two functions have the same name")
        if self.must_call and not names:
            raise ValueError("tool_choice: there are no tools to call")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool is named {self.tool_choice.function.name[:64]!a}")
        return self

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Functions that may be called, as plain dicts; with tool_choice none there are none."""
        functions = [] if self.tool_choice == "none" else [tool.function.as_dict() for tool in self.tools or []]
        if isinstance(self.tool_choice, NamedChoice):
            functions = [function for function in functions if function["name"] == self.tool_choice.function.name]
        return functions


class CalledFunction(Body):
    """arguments: JSON text of an object, as the reply held it."""

    name: str
    arguments: str = "{}"

    @model_validator(mode="after")
    def check_arguments(self) -> CalledFunction:
        self.mapping()
        return self

    def mapping(self) -> dict[str, Any]:
        """Templates write arguments themselves, so they get the object rather than its text."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError as error:
            raise ValueError(f"arguments of {self.name[:64]!a} are not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"arguments of {self.name[:64]!a} are not a JSON object")
        return value


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.mapping()}
        return {"type": "function", "function": function} | ({"id": self.id} if self.id else {})
