"""What the text of one chat choice is made of: a thought, an answer, tool calls.

Pure: feeds the reasoning splitter and the tool parser in turn.
"""

from __future__ import annotations

from server.reasoning import ReasoningSplitter
from server.tool_calls import Parsed, ToolParser, add_calls


class OutputParser:
    """Either part may be missing; without both, text is content."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    @property
    def completed_calls(self) -> int:
        return self._tools.completed if self._tools is not None else 0

    @property
    def ended(self) -> bool:
        """Nothing that follows would be shown."""
        return self._tools is not None and self._tools.ended

    def feed(self, text: str) -> Parsed:
        reasoning, content = self._reasoning.feed(text) if self._reasoning is not None else ("", text)
        return self._parse(reasoning, content)

    def finish(self) -> Parsed:
        reasoning, content = self._reasoning.finish() if self._reasoning is not None else ("", "")
        parsed = self._parse(reasoning, content)
        if self._tools is not None:
            rest = self._tools.finish()
            parsed.content += rest.content
            add_calls(parsed.calls, rest.calls)
        return parsed

    def _parse(self, reasoning: str, content: str) -> Parsed:
        parsed = self._tools.feed(content) if self._tools is not None else Parsed(content)
        parsed.reasoning = reasoning
        return parsed
