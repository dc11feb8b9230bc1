"""Turns nested elements, such as `<a><b>1</b></a>`, into JSON values by a tool's schema.

An element with children is an array where its schema says so, else an object. Children of one name
in an object are a list. Text is read as the narrowest type that it fits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdserve.text.tool_parsers.tool_call_grammar import resolve_reference
from pdserve.text.tool_parsers.typed_values import types_of_schema, value_as_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.protocols.completion_requests import Tool

__all__ = ["Element", "ElementValues"]

_MOST_PARTS: Final = 64
"""Most schemas that one element's schema may combine; further ones are not looked at."""
_TEXT: Final = "$text"
"""Key of text beside children."""


@dataclass(slots=True)
class Element:
    name: str
    texts: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)


class ElementValues:
    """Values of one tool's arguments; of an unknown tool, all are strings."""

    __slots__ = ("_known", "_root")

    def __init__(self, tool: Tool | None) -> None:
        self._root = (tool.function.parameters if tool is not None else None) or {}
        self._known: dict[int, _Kind] = {}
        """What schemas mean, by their identity: a model may write many elements of one."""

    def is_text(self, name: str) -> bool:
        """Whether the argument can be nothing but a string."""
        properties = self._root.get("properties")
        if not isinstance(properties, dict) or name not in properties:
            return False
        kind = self._kind(properties[name])
        return kind.types == ("string",) and not kind.container

    def argument(self, elements: list[Element]) -> str:
        """The JSON of an argument; of several elements, a list."""
        properties = self._root.get("properties")
        name = elements[0].name
        schema = properties.get(name) if isinstance(properties, dict) else None
        return _one_or_list([self._value(each, schema) for each in elements])

    def _value(self, element: Element, schema: Any) -> str:
        kind = self._kind(schema)
        text = "".join(element.texts)
        if not element.children:
            if kind.container and "string" not in kind.types and not text.strip():
                return "[]" if kind.container == "array" else "{}"
            return value_as_json(text, kind.types or ("string",))
        if kind.container == "array":
            items = [self._value(each, kind.items) for each in element.children]
            return f"[{', '.join(items)}]"
        found: dict[str, list[str]] = {}
        for each in element.children:
            schema = kind.properties.get(each.name, kind.additional)
            found.setdefault(each.name, []).append(self._value(each, schema))
        if text.strip():
            found.setdefault(_TEXT, []).append(json.dumps(text, ensure_ascii=False))
        pairs = (
            f"{json.dumps(name, ensure_ascii=False)}: {_one_or_list(values)}"
            for name, values in found.items()
        )
        return f"{{{', '.join(pairs)}}}"

    def _kind(self, schema: Any) -> _Kind:
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = _Kind(self._parts(schema))
        return known

    def _parts(self, schema: Any) -> list[dict[str, Any]]:
        """The schema and those that it combines; references may be circular."""
        waiting, seen = [schema], dict[int, dict[str, Any]]()
        while waiting and len(seen) < _MOST_PARTS:
            part = waiting.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen[id(part)] = part
            for key in ("anyOf", "oneOf", "allOf"):
                several = part.get(key)
                waiting += several[:_MOST_PARTS] if isinstance(several, list) else ()
            if isinstance(part.get("$ref"), str):
                waiting.append(resolve_reference(self._root, part["$ref"]))
        return list(seen.values())


def _one_or_list(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


class _Kind:
    """What an element of a schema may be."""

    __slots__ = ("additional", "container", "items", "properties", "types")

    def __init__(self, parts: Iterable[dict[str, Any]]) -> None:
        self.types: tuple[str, ...] = ()
        self.container = ""
        """What children make of the element: `array`, `object`, or nothing certain."""
        self.items: Any = None
        self.properties: dict[str, Any] = {}
        self.additional: Any = None
        for part in parts:
            self._add(part)

    def _add(self, part: dict[str, Any]) -> None:
        types = types_of_schema(part)
        properties = part.get("properties")
        implied = "array" if "items" in part else "object" if isinstance(properties, dict) else ""
        for kind in types or ((implied,) if implied else ()):
            if kind not in self.types:
                self.types = (*self.types, kind)
            if kind in ("array", "object") and not self.container:
                self.container = kind
        if self.items is None:
            self.items = part.get("items")
        if isinstance(properties, dict):
            self.properties = {**properties, **self.properties}
        if self.additional is None:
            self.additional = part.get("additionalProperties")
