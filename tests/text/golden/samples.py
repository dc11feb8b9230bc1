"""What models write, and what is to be read from it: written here, as each family writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.protocols.completion_requests import FunctionSpec, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence

NODE = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "children": {"type": "array"}},
    "required": ["label"],
}


def tool(name: str, strict: bool = False, /, **properties: Any) -> Tool:
    """A tool all of whose parameters but those that are named `opt_…` are required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [each for each in properties if not each.startswith("opt_")],
        "additionalProperties": False,
        "$defs": {"node": NODE},
    }
    return Tool(function=FunctionSpec(name=name, parameters=schema, strict=strict))


TOOLS = (
    tool(
        "get_weather",
        city={"type": "string"},
        opt_days={"type": "integer"},
        opt_unit={"enum": ["celsius", "fahrenheit"]},
    ),
    tool(
        "write_file",
        path={"type": "string"},
        content={"type": "string"},
        opt_mode={"type": ["integer", "null"]},
        opt_executable={"type": "boolean"},
    ),
    tool(
        "plan",
        steps={"type": "array", "items": {"type": "string"}},
        opt_tree={"$ref": "#/$defs/node"},
        opt_ratio={"type": "number"},
        opt_note={"anyOf": [{"type": "string"}, {"type": "null"}]},
        opt_any={},
    ),
    tool("tool_call", q={"type": "string"}),
    Tool(function=FunctionSpec(name="now")),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments that the answer ended in, or that are no JSON: exactly this text."""

    text: str


Call = tuple[str, dict[str, Any] | Cut]
"""Its name and its arguments."""


@dataclass(frozen=True, slots=True)
class Sample:
    about: str
    text: str
    content: str = ""
    calls: Sequence[Call] = ()
    literal: Sequence[str] = field(default=())
    """Markers that are text here."""
    reasoning: str = ""
    begun: bool = False
